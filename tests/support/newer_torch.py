"""What only newer versions of torch have, for the tests of it: with the oldest one supported they are skipped."""

import re

import pytest
import torch

SINCE = {
    "fully_shard": "2.7",  # on the CPU
    "torch.distributed.pipelining": "2.8",  # whose schedules take DistributedDataParallel
    "bias=False": "2.13",  # of a batch norm
}


def is_missing(feature: str) -> bool:
    """Whether the installed torch is too old for it."""
    return torch.__version__ < SINCE[feature]


def needs(feature: str) -> pytest.MarkDecorator:
    """Marks a test, or a case of one."""
    return pytest.mark.skipif(is_missing(feature), reason=f"{feature} needs torch {SINCE[feature]}")


def skip_if_one_is_missing(code: str) -> None:
    """Skips a test of code that imports one of these."""
    for feature, version in SINCE.items():
        if re.search(rf"import.*\b{feature}\b|from {feature} import", code) and is_missing(feature):
            pytest.skip(f"{feature} needs torch {version}")
