"""Pickles of whole models name public classes only, so they load wherever the files below `client` lie."""

import pickle
import pickletools
from pathlib import Path

import torch

import client

# Written when each class was still in a separate file directly in `client`.
PICKLED = Path(__file__).parent / "pickled_model.pt"


def test_a_model_that_was_pickled_before_the_files_moved_loads_and_computes_the_same():
    saved = torch.load(PICKLED, weights_only=False)
    model = saved["model"].module
    assert torch.equal(model(saved["input"]), saved["output"])
    assert [type(layer) for layer in model] == [
        client.SynchronizedBatchNorm2d,
        client.SynchronizedBatchNorm2d,  # it was lazy
        torch.nn.Flatten,
        client.SynchronizedBatchNorm1d,
        client.SynchronizedBatchNorm,
    ]
    assert [getattr(layer, "chunks", None) for layer in model] == [1, 2, None, 4, 1]
    assert [getattr(layer, "group", None) for layer in model] == [None, None, None, client.Group("pair", 2), "local"]
    assert saved["model"].has_virtual_replicas


def test_a_pickled_model_names_only_public_names_of_ours():
    model = torch.load(PICKLED, weights_only=False)["model"]
    opcodes = pickletools.genops(pickle.dumps(model, protocol=2))
    named = {tuple(argument.split()) for opcode, argument, _ in opcodes if opcode.name == "GLOBAL"}
    ours = {(module, name) for module, name in named if module.partition(".")[0] in {"client", "statsd_bn", "server"}}
    assert ours
    assert all(module == "client" and name in client.__all__ for module, name in ours), ours
