"""Models that were pickled and saved at 62e93b8 load, evaluate and train as they did then."""

import gzip
import io
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import client
from support.contract_pickles import MODELS, Functional, evaluated, trained

FOLDER = Path(__file__).with_name("pickles")


def content_of(name):
    return gzip.decompress((FOLDER / f"{name}.gz").read_bytes())


MODELS_THEN = pickle.loads(content_of("models.pickle"))  # noqa: S301 - our own file
STATES_THEN = torch.load(io.BytesIO(content_of("states.pt")))
EXPECTED = torch.load(io.BytesIO(content_of("expected.pt")))

LOADERS = {"pickle": pickle.loads, "torch": lambda saved: torch.load(io.BytesIO(saved), weights_only=False)}


def loaded(name, by="pickle"):
    return LOADERS[by](MODELS_THEN[name][by])


def repickled(model):
    return pickle.loads(pickle.dumps(model))  # noqa: S301 - written here


def test_the_files_have_each_model():
    assert MODELS_THEN.keys() == EXPECTED.keys() == MODELS.keys()
    assert STATES_THEN.keys() == MODELS.keys() - {"lazy"}


@pytest.mark.parametrize("by", LOADERS)
@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_evaluates_and_trains_as_it_did(name, by):
    x, factors = MODELS[name].tensors()
    torch.testing.assert_close(evaluated(loaded(name, by), x), EXPECTED[name]["eval"])
    torch.testing.assert_close(trained(loaded(name, by).train(), x, factors), EXPECTED[name]["step"])


@pytest.mark.parametrize("name", STATES_THEN)
def test_a_saved_state_loads_into_a_new_model(name):
    x, factors = MODELS[name].tensors()
    model = MODELS[name].model()
    model.load_state_dict(STATES_THEN[name])
    torch.testing.assert_close(evaluated(model, x), EXPECTED[name]["eval"])
    torch.testing.assert_close(trained(model.train(), x, factors), EXPECTED[name]["step"])


@pytest.mark.parametrize("name", ["1d", "2d", "3d"])
def test_a_saved_state_is_one_of_torchs_layers(name):
    torchs = getattr(nn, f"BatchNorm{name}")(3).double()
    torchs.load_state_dict(STATES_THEN[name])
    torch.testing.assert_close(evaluated(torchs, MODELS[name].tensors()[0]), EXPECTED[name]["eval"])


@pytest.mark.parametrize("again", [lambda model: model, repickled], ids=["then", "today"])
def test_what_a_layer_was_given_is_in_its_pickle_and_in_one_of_today(again):
    assert again(loaded("eps_mode")).eps_mode == "clamp"
    with_chunks = again(loaded("chunks and group"))
    assert (with_chunks.chunks, with_chunks.group) == (2, client.Group("pair", 2))
    assert again(loaded("converted subclass with chunks")).chunks == 2
    assert again(loaded("converted network"))[1].layer_name == "1"
    assert again(loaded("DataParallelWithCallback")).has_virtual_replicas


def test_a_loaded_subclass_has_the_class_that_is_made_of_its_own():
    layer = loaded("converted subclass")
    assert type(layer) is client.synchronized_class(Functional)
    assert type(layer.act) is nn.LeakyReLU
    assert type(client.revert_model(layer)) is Functional


def test_a_loaded_lazy_layer_learns_its_channels():
    layer = loaded("lazy")
    assert type(layer) is client.LazySynchronizedBatchNorm2d
    layer(torch.ones(2, 5, 2, 2))
    assert (type(layer), layer.num_features, layer.eps) == (client.SynchronizedBatchNorm2d, 5, 0.5)
