"""A machine is run to its end; the first wait, which is over soon in most rounds, is a short one."""

import pytest

from client.connection import driver

FIRST, SECOND = b"first", b"second"


class Counts:
    """A machine that sends what it has, and ends with the frames that came when there are so many."""

    def __init__(self, number):
        self.number = number
        self.came = []

    def begin(self, now):
        return (FIRST,), now + 1, None if self.number else []

    def step(self, now, frame):
        self.came.append(frame)
        return (SECOND,), now + 1, self.came if len(self.came) == self.number else None


class Channel:
    """Answers at once, or only those who wait for long."""

    def __init__(self, *, soon):
        self.soon = soon
        self.sent = []

    def send(self, frame):
        self.sent.append(frame)

    def receive_soon(self):
        return b"soon" if self.soon else None

    def receive(self, seconds):
        assert 0 < seconds <= 1
        return b"late"


@pytest.mark.parametrize(
    ("number", "soon", "came"),
    [
        (0, False, []),
        (1, True, [b"soon"]),
        (1, False, [b"late"]),
        (3, True, [b"soon", b"late", b"late"]),
        (2, False, [b"late", b"late"]),
    ],
)
def test_a_machine_is_given_frames_until_it_ends_and_each_turn_is_sent(number, soon, came):
    channel = Channel(soon=soon)
    assert driver.run(Counts(number), channel) == came
    assert channel.sent == [FIRST, *[SECOND] * number]
