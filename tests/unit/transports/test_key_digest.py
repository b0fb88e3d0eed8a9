"""The digest of a round's key: equal for equal keys only."""

import itertools

import pytest

from client.transports.transport import key_digest
from statsd_bn.round_key import BACKWARD, FORWARD, RoundKey

KEY = RoundKey("job", "world", 1, 2, "stem.bn", 3, FORWARD)


def test_the_same_key_has_the_same_digest_and_it_fits_into_a_word():
    assert key_digest(KEY) == key_digest(RoundKey(*KEY))
    assert 0 <= key_digest(KEY) < 2**64


@pytest.mark.parametrize("other", [("jo", "bworld"), ("job", "worl")], ids=str)
def test_names_are_distinguished_by_their_lengths_too(other):
    assert key_digest(RoundKey(*other, *KEY[2:])) != key_digest(KEY)


@pytest.mark.parametrize(("field", "value"), [(2, 2), (3, 3), (4, "stem.b"), (5, 4), (6, BACKWARD)])
def test_each_field_counts(field, value):
    changed = list(KEY)
    changed[field] = value
    assert key_digest(RoundKey(*changed)) != key_digest(KEY)


def test_many_rounds_have_different_digests():
    layers = [f"layer{n}" for n in range(20)]
    keys = [
        RoundKey("job", "world", 0, step, layer, call, phase)
        for step, layer, call, phase in itertools.product(range(100), layers, range(10), (FORWARD, BACKWARD))
    ]
    assert len({key_digest(key) for key in keys}) == len(keys)
