"""Where these tests run: on the CPU, and again on a GPU where there is one.

This folder needs pytest and nothing else that the other tests need, so that it runs on a machine with a GPU as it is.
"""

import pytest
import torch

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
)


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> str:
    """The type of device."""
    return str(request.param)
