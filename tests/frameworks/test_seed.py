"""The tests of Synchronized-BatchNorm-PyTorch, run on `client`; two replicas on the CPU replace two GPUs."""

import importlib.util
import re
import sys
import unittest
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import client
from support import seed_helpers

SEED = importlib.util.find_spec("sync_batchnorm")

pytestmark = pytest.mark.skipif(
    SEED is None, reason="needs Synchronized-BatchNorm-PyTorch, see docs/frameworks.md#what-is-tested"
)

FILES = ("test_numeric_batchnorm.py", "test_numeric_batchnorm_v2.py", "test_sync_batchnorm.py")
TESTS = 7
OF_REPLICAS_IN_TRAINING = {"testSyncBatchNormSyncTrain", "testSyncBatchNorm2DSyncTrain"}


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch):
    for name in ("unittest", "batchnorm_reimpl"):  # we lack these modules; the tests import helpers from them
        monkeypatch.setitem(sys.modules, f"client.{name}", seed_helpers)
    replicas = partial(virtual_replicas, client.DataParallelWithCallback)
    monkeypatch.setattr(client, "DataParallelWithCallback", replicas)
    for moved in (nn.Module, torch.Tensor):
        monkeypatch.setattr(moved, "cuda", lambda self: self)
    eps_mode = client.SynchronizedBatchNorm.eps_mode
    torch.manual_seed(0)
    yield
    client.set_sbn_eps_mode(eps_mode)


def virtual_replicas(wrapper, module, device_ids):
    return wrapper(module, device_ids=["cpu"] * len(device_ids))


def failed():
    suite = unittest.TestSuite()
    for name in FILES:
        suite.addTests(unittest.defaultTestLoader.loadTestsFromModule(with_our_name(name)))
    result = unittest.TestResult()
    suite.run(result)
    assert result.testsRun == TESTS
    return {test.id().rpartition(".")[2]: why for test, why in result.failures + result.errors}


def with_our_name(name):
    file = Path(SEED.origin).parents[1] / "tests" / name
    source, lines = re.subn(r"^from sync_batchnorm\b", "from client", file.read_text(), flags=re.MULTILINE)
    assert lines
    module = ModuleType(file.stem)
    exec(compile(source, file, "exec"), vars(module))  # noqa: S102 - a test that the user has named
    return module


def test_the_tests_of_the_library_pass():
    assert not failed()


def test_tests_of_the_library_fail_without_synchronisation(monkeypatch):
    for dimensions in ("1d", "2d"):
        monkeypatch.setattr(client, f"SynchronizedBatchNorm{dimensions}", getattr(nn, f"BatchNorm{dimensions}"))
    assert set(failed()) == OF_REPLICAS_IN_TRAINING
