"""Whether the kernels serve an input."""

import logging
from functools import cache
from importlib import import_module

import torch
from torch import Tensor

logger = logging.getLogger("statsd_bn.client")

# Before, numbers came to the kernels as float32, whatever they are annotated with.
OLDEST = (3, 4)

TYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def serves(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether the kernels serve an input with these parameters, on its device."""
    is_plain = type(x) in {Tensor, torch.nn.Parameter} and not x.is_neg()  # else its address is not that of its values
    if not is_plain or x.dtype not in TYPES or not x.is_cuda or not works_on(x.device, x.dtype):
        return False
    from client.ops.triton import launch  # noqa: PLC0415 - needs Triton

    return launch.fits(x) and all(each is None or each.device == x.device for each in (weight, bias))


@cache
def works_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton is installed and compiles for inputs of a type on a device; the log says so once where not.

    All kernels are tried: one that failed in a round would leave the other ranks waiting in it.
    """
    try:
        _check_version(import_module("triton").__version__)
        from client.ops.triton import launch  # noqa: PLC0415 - as above

        launch.try_out(device, dtype)
    except Exception as error:  # noqa: BLE001 - compilers, drivers and the import fail in many ways
        logger.warning(
            "Triton does not work for %s on %s, so layers compute with torch's operators, which takes the host longer: "
            "%s: %.300s",
            dtype,
            device,
            type(error).__name__,
            error,
        )
        return False
    return True


def _check_version(found: str) -> None:
    if tuple(map(int, found.split(".")[:2])) < OLDEST:
        raise ImportError(f"expected Triton {'.'.join(map(str, OLDEST))} or newer, got {found}")
