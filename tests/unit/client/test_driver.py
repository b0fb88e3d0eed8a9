"""A machine is run to its end; only a wait that is not over soon is told to whoever wants to know of it."""

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
        self.sent, self.waits = [], []

    def send(self, frame):
        self.sent.append(frame)

    def receive_soon(self):
        return b"soon" if self.soon else None

    def receive(self, seconds):
        assert 0 < seconds <= 1
        return b"late"


def run(machine, channel):
    def wait(rest):
        channel.waits.append(len(channel.sent))
        return rest()

    return driver.run(machine, channel, wait)


def test_an_answer_that_comes_soon_is_no_long_wait():
    channel = Channel(soon=True)
    assert run(Counts(1), channel) == [b"soon"]
    assert (channel.sent, channel.waits) == ([FIRST, SECOND], [])


def test_a_machine_that_wants_more_than_one_frame_waits_for_long_once():
    channel = Channel(soon=True)
    assert run(Counts(3), channel) == [b"soon", b"late", b"late"]
    assert (channel.sent, channel.waits) == ([FIRST, SECOND, SECOND, SECOND], [2])


def test_an_answer_that_does_not_come_soon_is_waited_for_within_wait():
    channel = Channel(soon=False)
    assert run(Counts(1), channel) == [b"late"]
    assert (channel.sent, channel.waits) == ([FIRST, SECOND], [1])


def test_without_anybody_who_wants_to_know_it_runs_as_well():
    assert driver.run(Counts(2), Channel(soon=False)) == [b"late", b"late"]


def test_a_machine_that_is_over_when_it_begins_waits_for_nothing():
    channel = Channel(soon=False)
    assert run(Counts(0), channel) == []
    assert (channel.sent, channel.waits) == ([FIRST], [])
