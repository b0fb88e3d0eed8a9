"""The digest of a round's key: equal for equal keys only."""

import itertools

import pytest

from client.transports.key_digest import digest_of
from statsd_bn.round_key import BACKWARD, FORWARD, RoundKey

KEY = RoundKey("job", "world", 1, 2, "stem.bn", 3, FORWARD)


def test_the_same_key_has_the_same_digest_and_it_fits_into_a_word():
    assert digest_of(KEY) == digest_of(RoundKey(*KEY))
    assert 0 <= digest_of(KEY) < 2**64


@pytest.mark.parametrize("other", [("jo", "bworld"), ("job", "worl")], ids=str)
def test_names_are_told_apart_wherever_one_ends(other):
    assert digest_of(RoundKey(*other, *KEY[2:])) != digest_of(KEY)


@pytest.mark.parametrize(("field", "value"), [(2, 2), (3, 3), (4, "stem.b"), (5, 4), (6, BACKWARD)])
def test_each_field_counts(field, value):
    changed = list(KEY)
    changed[field] = value
    assert digest_of(RoundKey(*changed)) != digest_of(KEY)


def test_no_two_of_many_rounds_are_alike():
    layers = [f"layer{n}" for n in range(20)]
    keys = [
        RoundKey("job", "world", 0, step, layer, call, phase)
        for step, layer, call, phase in itertools.product(range(100), layers, range(10), (FORWARD, BACKWARD))
    ]
    assert len({digest_of(key) for key in keys}) == len(keys)
