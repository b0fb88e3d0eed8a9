"""Idioms of users' code around batch norms, which torch's layers allow and a conversion must not break."""

import pytest
import torch
from torch import nn

import client

CHANNELS = 4


def batch():
    return torch.randn(6, CHANNELS, 3, 3, generator=torch.Generator().manual_seed(1))


class SuperOfItsClass(nn.BatchNorm2d):
    def forward(self, x):
        return super(self.__class__, self).forward(x).relu()


class SuperOfItsType(nn.BatchNorm2d):
    def train(self, mode=True):
        return super(type(self), self).train(mode)


@pytest.mark.parametrize(("kind", "method"), [(SuperOfItsClass, "forward"), (SuperOfItsType, "train")])
def test_a_class_that_nothing_can_be_derived_from_without_an_endless_call_is_left_and_named(kind, method):
    model = nn.Sequential(kind(CHANNELS))
    with pytest.warns(UserWarning, match=rf"'0' \({kind.__name__}: its {method} calls super\("):
        client.convert_model(model)
    model.train()(batch())


class MadeBySuperOfItsClass(nn.BatchNorm2d):
    def __init__(self, channels):
        super(self.__class__, self).__init__(channels)

    def forward(self, x):
        return super().forward(x) * len(self.__class__.__name__)


def test_a_layer_that_was_made_like_that_is_synchronised():
    model = client.convert_model(nn.Sequential(MadeBySuperOfItsClass(CHANNELS)))
    assert list(client.conversion_report(model).synchronised) == ["0"]
    model(batch())
