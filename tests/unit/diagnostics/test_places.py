"""Host and process id of other ranks, which a rank requests from the server; without an answer, errors lack them."""

from unittest import mock

import numpy as np
import pytest

from client.transports import server
from client.transports.server import PLACES_SECONDS, SlavePipe, places_in_report, query_places
from statsd_bn.errors import ProtocolError, ServerUnreachable
from statsd_bn.members import MAX_NAMED_RANKS, Members, format_ranks
from statsd_bn.messages import Failure, Status, StatusRequest
from statsd_bn.reduction import Rows
from statsd_bn.wire import decode, encode
from support.memory_members import MemoryMaster, run_members, wait_until
from support.strategies import key

WHERE = {0: "host-a, pid 811", 1: "host-b, pid 812"}


def answer(**group):
    return Status({"groups": [{"job": "other", "group": "world"}, {"job": "job", "group": "world", **group}]})


STATUS = answer(members=[{"member": number, "place": place} for number, place in WHERE.items()])


class Answers:
    """A channel to a server that answers each frame with the next of `answers`; None stands for no answer."""

    def __init__(self, *answers):
        self.sent, self._answers = [], list(answers)

    def send(self, frame):
        self.sent.append(decode(frame))

    def receive(self, seconds):
        assert 0 < seconds <= PLACES_SECONDS
        answer = self._answers.pop(0) if self._answers else None
        return None if answer is None else encode(answer)


def test_the_places_come_from_the_servers_status():
    channel = Answers(STATUS)
    assert query_places(channel, "job") == WHERE
    assert channel.sent == [StatusRequest()]


def test_the_status_is_requested_again_over_a_new_connection_until_the_timeout(monkeypatch):
    channel = Answers(None, STATUS)
    assert query_places(channel, "job") == WHERE
    assert channel.sent == [StatusRequest()] * 2
    monkeypatch.setattr(server, "PLACES_SECONDS", 0.01)
    with pytest.raises(ServerUnreachable):
        query_places(Answers(), "job")


def test_messages_about_a_round_are_skipped():
    about_a_round = Failure("round_failed", "no", {}, key())
    assert query_places(Answers(about_a_round, STATUS), "job") == WHERE
    with pytest.raises(ProtocolError, match="expected a status, got no"):
        query_places(Answers(about_a_round, Failure("refused", "no", {})), "job")


def test_a_member_that_left_is_named_as_reported_by_the_server():
    text = "first non-finite: layer 'b', forward, step 0, rank 1 (host-b, pid 812), rank 7, 1 of 2 channels (inf)"
    status = answer(members=[{"member": 0, "place": WHERE[0]}], non_finite=[text])
    assert places_in_report(status.report, "job") == WHERE
    assert places_in_report(status.report, "other") == {}


@pytest.mark.parametrize(
    "report",
    [{}, {"groups": 3}, {"groups": [3]}, {"groups": [{"job": "job", "group": "world", "members": [3, {"member": 1}]}]}],
)
def test_an_invalid_report_names_no_member(report):
    assert places_in_report(report, "job") == {}


def test_an_answer_cannot_control_a_terminal():
    report = answer(members=[{"member": 0, "place": "a\x1b[2J"}]).report
    assert places_in_report(report, "job") == {0: "a\\x1b[2J"}


def test_a_transport_over_the_server_knows_all_members():
    def program(connection):
        transport = SlavePipe(connection, "bn")
        transport.run_slave(Rows((1,), np.ones((1, 2, 1))))
        found = transport.places()
        transport.run_slave(Rows((1,), np.ones((1, 2, 1))))  # neither rank leaves before both have asked
        return found

    assert run_members(2, program) == [{0: "thread 0", 1: "thread 1"}] * 2


def test_a_member_that_contributes_nan_and_leaves_is_still_known():
    master = MemoryMaster()

    def program(connection):
        transport = SlavePipe(connection, "bn")
        transport.run_slave(Rows((1,), np.full((1, 2, 1), np.nan if connection.rank else 1.0)))
        if connection.rank:
            return None
        wait_until(lambda: master.members("world") == [0])
        return transport.places()

    assert run_members(2, program, master)[0] == {0: "thread 0", 1: "thread 1"}


def test_a_silent_server_delays_the_query_of_places_only_for_a_moment():
    with MemoryMaster().connect(0, 1) as connection, mock.patch.object(server, "PLACES_SECONDS", 0.01):
        silent = mock.patch.object(connection.channel_pool, "_call")
        with silent:
            assert SlavePipe(connection, "bn").places() == {}
        assert SlavePipe(connection, "bn").places() == {0: "thread 0"}


def test_only_the_first_ranks_of_a_large_job_query_the_places():
    with MemoryMaster().connect(0, 1) as connection:
        for most, expected in ((1, {0: "thread 0"}), (0, {})):
            with mock.patch.object(server, "MAX_QUERYING_RANKS", most):
                assert SlavePipe(connection, "bn").places() == expected


@pytest.mark.parametrize(
    ("numbers", "where", "text"),
    [
        ([1], WHERE, "rank 1 (host-b, pid 812)"),
        ([0, 1, 2], WHERE, "rank 0 (host-a, pid 811), rank 1 (host-b, pid 812), rank 2"),
        ([0, 1, 2], {}, "ranks 0-2"),
        ([2], WHERE, "rank 2"),
    ],
)
def test_ranks_are_named_with_their_known_places(numbers, where, text):
    assert format_ranks(Members.of(numbers), where) == text


def test_of_many_ranks_the_first_are_named():
    text = format_ranks(Members.of(range(MAX_NAMED_RANKS + 2)), WHERE)
    assert text.startswith("rank 0 (host-a, pid 811), rank 1 (host-b, pid 812), rank 2, ")
    assert text.endswith(", rank 7 and 2 more")
