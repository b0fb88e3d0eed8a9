"""TcpState that are not read: bounded in bytes, and whoever reads gets its own."""

import socket
from collections.abc import Collection

from server.network.sender import MAX_PEER_BYTES, MAX_TOTAL_BYTES, SMALL_ANSWER_BYTES, FlowControl, writable


class Kernel:
    """Peers that read, and those that do not; what was sent to these waits."""

    def __init__(self, *stuck: int) -> None:
        self.stuck = set(stuck)
        self.looks = 0
        self.flow_control = FlowControl(self.takes_more)

    def takes_more(self, descriptors: Collection[int]) -> set[int]:
        self.looks += 1
        return set(descriptors) - self.stuck

    def meet(self, *descriptors: int) -> None:
        for descriptor in descriptors:
            self.flow_control.add(b"%d" % descriptor, descriptor)

    def sent(self, descriptor: int, size: int, times: int) -> int:
        return size * sum(self.flow_control.may_send(b"%d" % descriptor, size) for _ in range(times))


def test_who_reads_is_sent_everything():
    kernel = Kernel()
    kernel.meet(1)
    assert kernel.sent(1, MAX_PEER_BYTES, 100) == 100 * MAX_PEER_BYTES
    assert kernel.sent(1, 1000, 10_000) == 10_000_000
    assert kernel.looks < 200, "looked at seldom: it takes a system call"


def test_who_does_not_read_is_sent_little():
    kernel = Kernel(1)
    kernel.meet(1, 2)
    assert kernel.sent(1, 1000, 10_000) <= MAX_PEER_BYTES
    assert kernel.sent(2, 1000, 10_000) == 10_000_000


def test_one_answer_is_sent_however_large():
    kernel = Kernel(1)
    kernel.meet(1)
    assert kernel.sent(1, 4 * MAX_PEER_BYTES, 3) == 4 * MAX_PEER_BYTES


def test_who_begins_to_read_again_is_sent_more():
    kernel = Kernel(1)
    kernel.meet(1)
    assert kernel.sent(1, MAX_PEER_BYTES, 3) == MAX_PEER_BYTES
    kernel.stuck.clear()
    assert kernel.sent(1, MAX_PEER_BYTES, 3) == 3 * MAX_PEER_BYTES


def test_many_who_do_not_read_are_bounded_together_and_who_reads_is_served():
    many = range(1000)
    kernel = Kernel(*many)
    kernel.meet(*many, 5000)
    taken = sum(kernel.sent(number, MAX_PEER_BYTES, 3) for number in many)
    assert taken <= 2 * MAX_TOTAL_BYTES
    assert kernel.sent(5000, SMALL_ANSWER_BYTES, 100) == 100 * SMALL_ANSWER_BYTES


def test_who_does_not_read_is_cut_off_where_too_much_waits_and_nobody_else():
    kernel = Kernel(*range(100))
    kernel.meet(*range(100), 5000)
    for number in range(100):
        kernel.sent(number, MAX_PEER_BYTES, 1)
    kernel.sent(5000, MAX_PEER_BYTES, 1)
    assert kernel.flow_control.stalled() == [], "each has a moment to read"
    kernel.stuck.discard(7)
    cut = kernel.flow_control.stalled()
    assert not {7, 5000} & set(cut)
    for number in cut:
        kernel.flow_control.remove(number)
    assert kernel.flow_control.stalled() == []
    assert kernel.sent(5000, MAX_PEER_BYTES, 10) == 10 * MAX_PEER_BYTES


def test_few_bytes_that_wait_cut_nobody_off():
    kernel = Kernel(1)
    kernel.meet(1)
    kernel.sent(1, MAX_PEER_BYTES, 1)
    assert kernel.flow_control.stalled() == kernel.flow_control.stalled() == []


def test_a_connection_that_takes_the_number_of_another_begins_anew():
    kernel = Kernel(1)
    kernel.meet(1)
    kernel.sent(1, MAX_PEER_BYTES, 1)
    kernel.flow_control.add(b"other", 1)
    assert b"1" not in kernel.flow_control.peers
    assert kernel.flow_control.may_send(b"other", MAX_PEER_BYTES)


def test_the_kernel_says_who_reads():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(0.0)
        assert writable([ours.fileno()]) == {ours.fileno()}
        with_room = True
        while with_room:
            try:
                ours.send(bytes(2**16))
            except BlockingIOError:
                with_room = False
        assert writable([ours.fileno()]) == set()
        number = ours.fileno()
    assert writable([number]) == {number}, "nothing waits where nobody is"
