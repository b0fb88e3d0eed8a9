"""A server takes any connections, routing ids, orders and breaks, and goes on; `scripts/fuzz` plays far more."""

import pytest

from attacks.socket_fuzz import Fuzz, Fuzzed, fuzz_socket


@pytest.mark.alone  # a busy server drops what has waited for a second, so the fuzz would take long
@pytest.mark.parametrize(
    ("with_keys", "frames"), [(False, 10_000), (True, 10_000)], ids=["open", "keys"], indirect=["with_keys"]
)
def test_the_socket_takes_anything(workers, with_keys, frames):
    """At 6b62bd3: SIGABRT."""
    tally = fuzz_socket(frames, seed=0, with_keys=with_keys, workers=workers)
    assert tally.looked_at - 2 * tally.rounds >= frames // 2
    assert tally.answered
    assert tally.rounds


@pytest.mark.parametrize("with_keys", [False], indirect=True)
def test_an_answer_with_the_mark_of_another_connection_is_found(server):
    fuzz = Fuzz(server, 0)
    own, other = fuzz.mark(), fuzz.mark()
    fuzz.check(own, b"job " + own)
    with pytest.raises(Fuzzed, match="was told of"):
        fuzz.check(own, b"job " + other)
