"""A server survives any frames and routing ids of key holders; `scripts/fuzz` sends far more."""

import pytest

from attacks.socket_fuzz import Fuzz, Fuzzed, fuzz_socket

FRAMES = 10_000


@pytest.mark.alone  # a busy server drops frames that waited for a second, so the fuzz would take long
def test_the_server_survives_any_bytes_at_its_socket(workers):
    tally = fuzz_socket(FRAMES, 0, workers)
    assert tally.decoded - 2 * tally.rounds >= FRAMES // 2
    assert tally.answer_bytes
    assert tally.rounds


def test_an_answer_with_the_mark_of_another_connection_is_found(server):
    fuzz = Fuzz(server, 0)
    own, other = fuzz.mark(), fuzz.mark()
    fuzz.check(own, b"job " + own)
    with pytest.raises(Fuzzed, match=r"connection .* received"):
        fuzz.check(own, b"job " + other)
