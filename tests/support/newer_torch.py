"""Features that only newer versions of torch have; with older versions their tests are skipped."""

import importlib.util
import re

import pytest
import torch

SINCE = {
    "fully_shard": "2.7",  # on the CPU
    "torch.distributed.pipelining": "2.8",  # with schedules for DistributedDataParallel
    "bias=False": "2.13",  # of a batch norm
    "several buckets compiled": "2.13",  # not tried with older versions
}


def is_missing(feature: str) -> bool:
    return torch.__version__ < SINCE[feature]


def needs(feature: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(is_missing(feature), reason=f"{feature} needs torch {SINCE[feature]}")


# Libraries that the extra `dev` does not have; `scripts/test frameworks` installs most of them.
LIBRARIES = (
    *("deepspeed", "detectron2", "mmengine", "monai", "tensorboard", "timm", "transformers", "ultralytics", "wandb"),
)


def skip_without_its_library(code: str) -> None:
    """Skips a test whose code needs one of `LIBRARIES`, or our integration with it, if the library is not installed."""
    for name in LIBRARIES:
        wanted = re.search(
            rf"^\s*(?:from|import) (?:client\.integrations\.|torch\.utils\.)?{name}\b", code, re.MULTILINE
        )
        if wanted and importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}, see docs/frameworks.md#what-is-tested")
    if "from ray." in code:
        pytest.skip("starts a Ray cluster; tests/frameworks/ray_program.py trains on one with enough CPUs")


def skip_if_one_is_missing(code: str) -> None:
    for feature, version in SINCE.items():
        if re.search(rf"import.*\b{feature}\b|from {feature} import", code) and is_missing(feature):
            pytest.skip(f"{feature} needs torch {version}")
