import struct
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.core.report import group_entries
from server.group import master
from server.group.master import SyncMaster
from server.group.rounds import Reply
from statsd_bn import limits
from statsd_bn.errors import StatsdBNError
from statsd_bn.messages import Aggregate, Failure, Heartbeat
from statsd_bn.reduction import Rows
from statsd_bn.round_key import RoundKey
from statsd_bn.wire import decode, encode_failure
from support.strategies import KEY, contribution, key, register, rows

SERVER = b"server-0"


class Group:
    def __init__(self, world_size: int, *, opened: bool = True, deadline: float = 600.0) -> None:
        self.now = 0.0
        self.deadline = deadline
        self.world_size = world_size
        self.master = SyncMaster(SERVER, self.registration(0))
        if opened:
            for member in range(world_size):
                self.join(member)

    def registration(self, member: int):
        return register(member, self.world_size, deadline=self.deadline)

    def join(self, member: int) -> list[Reply]:
        return self.master.register_slave(self.now, self.registration(member), peer(member))[1]

    def contribute(self, member: int, values: Rows | float = 1.0, key: RoundKey = KEY, at: bytes = b"") -> list[Reply]:
        contributor = self.master.membership.contributors[member]
        return self.master.contribute(self.now, contributor, contribution(member, values, key), at or peer(member))

    def leave(self, member: int, cause: str = "") -> list[Reply]:
        return self.master.remove_contributor(self.now, self.master.membership.contributors[member], cause)[1]


def peer(member: int) -> bytes:
    return b"peer %d" % member


def everyone(*members: int) -> set[bytes]:
    return {peer(member) for member in members}


def failures_of(replies: list[Reply]) -> dict[bytes, Failure]:
    """The failures by peer, at most one each."""
    found = {peer_id: decode(frame) for peer_id, frame in replies}
    assert len(found) == len(replies)
    assert all(isinstance(message, Failure) for message in found.values())
    return found


def the_aggregate(replies: list[Reply], *members: int) -> Aggregate:
    """The aggregate of these members; asserts that all got the same bytes."""
    assert {peer_id for peer_id, _ in replies} == everyone(*members)
    assert len(replies) == len(members)
    (frame,) = {frame for _, frame in replies}
    message = decode(frame)
    assert isinstance(message, Aggregate)
    return message


def left_to_right(values: Iterable[float]) -> bytes:
    total, *rest = values
    for value in rest:
        total = total + value
    return struct.pack("<d", total)


def test_no_member_is_answered_before_the_last_contribution():
    group = Group(3)
    assert group.contribute(0) == []
    assert group.contribute(2) == []
    assert the_aggregate(group.contribute(1), 0, 1, 2).count == 3
    assert group.master.done == 1


# Rounding depends on the order of these four: they sum to 0.0, 1.0 or 2.0.
TRICKY = (1e16, 1.0, -1e16, 1.0)


@given(st.permutations(range(4)))
def test_rows_are_added_in_replica_order_whatever_the_order_of_arrival(order):
    group = Group(4)
    for member in order:
        replies = group.contribute(member, TRICKY[member])
    assert the_aggregate(replies, 0, 1, 2, 3).values.tobytes() == left_to_right(TRICKY)


@given(st.permutations(range(3)), st.lists(st.lists(st.floats(), min_size=1, max_size=4), min_size=3, max_size=3))
def test_members_with_unequal_numbers_of_replicas_are_added_row_by_row(order, replicas):
    group = Group(3)
    finite = [[value if abs(value) < 1e300 else 0.1 for value in member] for member in replicas]
    for member in order:
        replies = group.contribute(member, rows(*finite[member], count=3))
    found = the_aggregate(replies, 0, 1, 2)
    assert found.replicas == sum(map(len, finite))
    assert found.count == 3 * found.replicas
    assert found.values.tobytes() == left_to_right(value for member in finite for value in member)


def test_row_by_row_is_not_member_by_member():
    group = Group(2)
    group.contribute(0, rows(1.0))
    replies = group.contribute(1, rows(1e16, 1.0, -1e16))
    assert the_aggregate(replies, 0, 1).values.tobytes() == left_to_right([1.0, 1e16, 1.0, -1e16])
    assert left_to_right([1.0, 1e16, 1.0, -1e16]) != left_to_right([1.0, (1e16 + 1.0) - 1e16])


def test_a_replica_with_an_empty_batch_takes_part():
    group = Group(3)
    group.contribute(0, Rows((4,), np.array([[[8.0, 1.0]]])))
    group.contribute(1, Rows((0,), np.zeros((1, 1, 2))))
    found = the_aggregate(group.contribute(2, Rows((0, 2), np.array([[[0.0, 0.0]], [[1.0, 2.0]]]))), 0, 1, 2)
    assert (found.replicas, found.count) == (4, 6)
    np.testing.assert_array_equal(found.values, [[9.0, 3.0]])


def test_a_round_of_empty_batches_only_gives_an_aggregate_too():
    group = Group(2)
    group.contribute(0, rows(0.0, count=0))
    assert the_aggregate(group.contribute(1, rows(0.0, count=0)), 0, 1).count == 0


def test_counts_are_added_exactly():
    group = Group(2)
    group.contribute(0, rows(1.0, count=2**52 + 1))
    assert the_aggregate(group.contribute(1, rows(1.0, count=2**52 - 1)), 0, 1).count == 2**53


def test_counts_that_cannot_be_exact_fail_the_round_for_everyone():
    group = Group(2)
    group.contribute(0, rows(1.0, count=2**53))
    failures = failures_of(group.contribute(1, rows(1.0)))
    assert set(failures) == everyone(0, 1)
    assert {failure.code for failure in failures.values()} == {"round_failed"}
    assert {failure.key for failure in failures.values()} == {KEY}
    assert "counts: expected a sum of at most 2^53, got 9007199254740993 with rank 1's" in failures[peer(0)].message
    assert (group.master.done, group.master.failed) == (0, 1)
    again = failures_of(group.contribute(0, rows(1.0, count=2**53)))
    assert again[peer(0)] == failures[peer(0)]
    group.contribute(0, key=key(step=1))
    the_aggregate(group.contribute(1, key=key(step=1)), 0, 1)


@pytest.mark.parametrize("pair", [(np.inf, -np.inf), (np.nan, 1.0), (1.7e308, 1.7e308)], ids=str)
def test_sums_that_are_not_finite_pass_without_a_warning(pair):
    group = Group(2)
    group.contribute(0, pair[0])
    found = the_aggregate(group.contribute(1, pair[1]), 0, 1)
    assert not np.isfinite(found.values).any()


def test_a_duplicate_while_waiting_is_not_added_twice():
    group = Group(2)
    assert group.contribute(0, 3.0) == []
    assert group.contribute(0, 3.0) == []
    assert the_aggregate(group.contribute(1, 4.0), 0, 1).values == 7.0


def test_a_duplicate_of_a_finished_round_gets_the_kept_bytes():
    group = Group(2)
    group.contribute(0, 3.0)
    answers = dict(group.contribute(1, 4.0))
    for _ in range(2):
        assert group.contribute(0, 3.0) == [(peer(0), answers[peer(0)])]
        assert group.contribute(1, 4.0, at=b"new peer") == [(b"new peer", answers[peer(1)])]
    assert group.master.done == 1


def test_different_bytes_while_waiting_are_reported_to_both_peers_and_the_first_are_used():
    group = Group(2)
    group.contribute(0, 3.0, at=b"first")
    failures = failures_of(group.contribute(0, 5.0, at=b"second"))
    assert set(failures) == {b"first", b"second"}
    assert {(failure.code, failure.key) for failure in failures.values()} == {("conflict", KEY)}
    replies = group.contribute(1, 4.0)
    assert {peer_id for peer_id, _ in replies} == {b"first", peer(1)}
    assert decode(replies[0][1]).values == 7.0


def test_different_bytes_from_the_same_peer_are_reported_once():
    group = Group(2)
    group.contribute(0, 3.0)
    assert set(failures_of(group.contribute(0, 5.0))) == everyone(0)


def test_a_second_contribution_of_another_shape_is_a_conflict_and_breaks_nothing():
    group = Group(2)
    group.contribute(0, rows(3.0, channels=64))
    assert failures_of(group.contribute(0, rows(3.0, channels=32)))[peer(0)].code == "conflict"
    the_aggregate(group.contribute(1, rows(3.0, channels=64)), 0, 1)


def test_different_bytes_after_the_round_conflict_and_the_kept_result_stays():
    group = Group(2)
    group.contribute(0, 3.0)
    frame = group.contribute(1, 4.0)[0][1]
    failures = failures_of(group.contribute(0, 5.0, at=b"second"))
    assert {peer_id: failure.code for peer_id, failure in failures.items()} == {b"second": "conflict"}
    assert group.contribute(0, 3.0) == [(peer(0), frame)]


def test_a_late_member_of_a_failed_round_learns_why_after_any_number_of_rounds():
    group = Group(2, deadline=5.0)
    group.contribute(0)
    (failure,) = failures_of(group.master.expire(5.0)).values()
    for step in range(1, 3 * limits.CACHED_ROUNDS):
        for member in (0, 1):
            group.contribute(member, 1.0, key(step=step))
    assert (failure.code, failure.key) == ("timeout", KEY)
    assert failures_of(group.contribute(1))[peer(1)].message == failure.message


def test_only_the_latest_failures_are_kept():
    group = Group(2)
    for step in range(3 * limits.CACHED_ROUNDS):
        group.contribute(0, 1.0, key(step=step))
        group.master.fail(key(step=step), StatsdBNError(f"step {step}"))
    assert len(group.master._cached_results | group.master._cached_failures) == limits.CACHED_ROUNDS
    step = 2 * limits.CACHED_ROUNDS
    assert failures_of(group.contribute(1, key=key(step=step)))[peer(1)].message == f"step {step}"
    assert "ended long ago" in failures_of(group.contribute(1, key=key(step=2)))[peer(1)].message


def test_only_the_latest_results_are_kept():
    group = Group(2)
    answers = {}
    for step in range(3 * limits.CACHED_ROUNDS):
        group.contribute(0, float(step), key(step=step))
        answers[step] = dict(group.contribute(1, 1.0, key(step=step)))[peer(0)]
    assert len(group.master._cached_results | group.master._cached_failures) == limits.CACHED_ROUNDS
    assert not group.master.open_rounds
    for step in list(answers)[-limits.CACHED_ROUNDS :]:
        assert group.contribute(0, float(step), key(step=step)) == [(peer(0), answers[step])]


def test_mismatching_contributions_break_the_round_for_everyone():
    group = Group(3)
    group.contribute(0, rows(1.0, channels=64))
    failures = failures_of(group.contribute(1, rows(1.0, channels=32)))
    assert set(failures) == everyone(0, 1)
    for failure_ in failures.values():
        assert (failure_.code, failure_.key) == ("mismatch", KEY)
        assert "expected 64 channels, as rank 0 sent, got 32 from rank 1" in failure_.message
    # Late and repeated contributions get the mismatch as well.
    assert failures_of(group.contribute(2, rows(1.0, channels=64)))[peer(2)].code == "mismatch"
    assert failures_of(group.contribute(1, rows(1.0, channels=32)))[peer(1)].code == "mismatch"
    assert (group.master.done, group.master.failed) == (0, 1)


def test_rounds_of_different_keys_do_not_mix():
    group = Group(2)
    keys = [KEY, key("other"), key(step=1), key(call=1), key(phase="backward")]
    for number, one in enumerate(keys):
        assert group.contribute(0, float(number), one) == []
    for number, one in reversed(list(enumerate(keys))):
        found = the_aggregate(group.contribute(1, 100.0, one), 0, 1)
        assert (found.key, found.values) == (one, 100.0 + number)


@pytest.mark.parametrize("wrong", [{"job": "other"}, {"group": "other"}, {"epoch": 1}], ids=str)
def test_a_key_of_another_group_is_refused(wrong):
    group = Group(2)
    strange = key(**wrong)
    failures = failures_of(group.contribute(0, key=strange))
    assert failures[peer(0)].code == "protocol"
    assert failures[peer(0)].key == strange
    assert "expected job 'job', group 'world', epoch 0, as rank 0 (place 0) registered" in failures[peer(0)].message
    assert not group.master.open_rounds


def test_a_contributor_before_the_group_is_open_is_asked_to_register():
    group = Group(3, opened=False)
    group.join(1)
    failures = failures_of(group.contribute(1))
    assert (failures[peer(1)].code, failures[peer(1)].key) == ("unknown_session", KEY)
    group.join(0)
    group.join(2)
    for member in (0, 1, 2):
        replies = group.contribute(member)
    the_aggregate(replies, 0, 1, 2)


def test_a_round_past_its_deadline_fails_and_names_the_missing_members():
    group = Group(3, deadline=10.0)
    group.now = 5.0
    group.contribute(2)
    group.now = 14.0
    group.contribute(0)
    assert group.master.expire(14.9) == []
    failures = failures_of(group.master.expire(15.0))
    assert set(failures) == everyone(0, 2)
    for failure_ in failures.values():
        assert (failure_.code, failure_.key) == ("timeout", KEY)
        assert failure_.message.splitlines()[:4] == [
            "rank 1 (place 1) did not arrive within 10 s",
            "  rank 1 (place 1)  missing       from forward of layer 'bn', step 0",
            "  rank 0 (place 0)  waits 1.0 s   in forward of layer 'bn', step 0",
            "  rank 2 (place 2)  waits 10.0 s  in forward of layer 'bn', step 0",
        ]
        assert (failure_.fields["missing"], failure_.fields["waiting"]) == ([1], [0, 2])
    assert group.master.expire(16.0) == []
    assert failures_of(group.contribute(1))[peer(1)].code == "timeout"


def test_each_round_has_its_own_deadline():
    group = Group(2, deadline=10.0)
    group.contribute(0, key=KEY)
    group.now = 5.0
    group.contribute(0, key=key(call=1))
    assert {failure.key for failure in failures_of(group.master.expire(10.0)).values()} == {KEY}
    assert {failure.key for failure in failures_of(group.master.expire(15.0)).values()} == {key(call=1)}


def test_a_finished_round_is_still_answered_after_a_loss():
    group = Group(2)
    group.contribute(0, 3.0)
    frame = group.contribute(1, 4.0)[0][1]
    group.leave(1)
    assert group.contribute(0, 3.0) == [(peer(0), frame)]


def test_a_group_has_no_more_open_rounds_than_the_limit():
    group = Group(2)
    for call in range(limits.MAX_OPEN_ROUNDS):
        assert group.contribute(0, key=key(call=call)) == []
    beyond = key(call=limits.MAX_OPEN_ROUNDS)
    failures = failures_of(group.contribute(0, key=beyond))
    assert (failures[peer(0)].code, failures[peer(0)].key) == ("limit", beyond)
    assert failures[peer(0)].fields == {"limit": limits.MAX_OPEN_ROUNDS, "what": "open rounds"}
    the_aggregate(group.contribute(1, key=key(call=0)), 0, 1)
    assert group.contribute(0, key=beyond) == []


def test_a_late_copy_of_a_contribution_does_not_restart_an_ended_round():
    group = Group(2)
    for step in range(limits.CACHED_ROUNDS + 1):
        group.contribute(0, key=key(step=step))
        group.contribute(1, key=key(step=step))
    ((_, frame),) = group.contribute(0, key=key(step=1))
    assert isinstance(decode(frame), Aggregate)
    late = failures_of(group.contribute(0, key=key(step=0)))[peer(0)]
    assert (late.code, late.key) == ("round_failed", key(step=0))
    assert "it ended long ago, and its result is no longer cached" in late.message
    assert list(group.master.open_rounds) == []


def test_a_bounded_number_of_ended_rounds_is_remembered(monkeypatch):
    monkeypatch.setattr(master, "REMEMBERED_ROUNDS", 2)
    group = Group(1)
    for step in range(limits.CACHED_ROUNDS + 4):
        group.contribute(0, key=key(step=step))
    answers = [decode(frame) for step in (3, 2, 1) for _, frame in group.contribute(0, key=key(step=step))]
    assert [type(answer) for answer in answers] == [Failure, Failure, Aggregate]


def report_of(master, now):
    (entry,) = group_entries([master], now, [])["groups"]
    return entry


def test_the_report_shows_members_counts_of_rounds_without_the_server():
    group = Group(2)
    group.contribute(0)
    group.contribute(1)
    contributors = group.master.membership.contributors
    for member, rounds in ((0, 40), (1, 38), (0, 39)):
        beat = Heartbeat(contributors[member].session, 7, rounds, "shared_memory", "")
        group.master.record_heartbeat(0.0, contributors[member], beat)
    report = report_of(group.master, 0.0)
    assert (report["rounds_done"], group.master.rounds_done) == (41, 41)
    assert [(one["step"], one["transport"]) for one in report["members"]] == [(7, "shared_memory")] * 2
    assert "why_not_faster" not in report
    beat = Heartbeat(contributors[0].session, 7, 40, "server", "rank 1 ended")
    group.master.record_heartbeat(0.0, contributors[0], beat)
    assert report_of(group.master, 0.0)["why_not_faster"] == "rank 1 ended"


def test_the_report_of_a_group_lists_present_and_awaited_members():
    group = Group(2, opened=False)
    group.join(1)
    assert report_of(group.master, 0.0)["missing"] == 1
    group.join(0)
    group.contribute(0, rows(1.0, 2.0))
    group.contribute(1)
    group.now = 3.0
    group.contribute(0, rows(1.0, 2.0), key("late"))
    report = report_of(group.master, 5.5)
    assert [contributor["member"] for contributor in report["members"]] == [0, 1]
    assert [contributor["replicas"] for contributor in report["members"]] == [2, 1]
    assert (report["missing"], report["rounds_done"], report["rounds_failed"]) == (0, 1, 0)
    late = {"layer": "late", "phase": "forward", "step": 0}
    assert report["waiting"] == [{"round": str(key("late")), "seconds": 2.5, "missing": [1], **late}]
    assert "lost_by" not in report
    group.leave(1, "boom")
    report = report_of(group.master, 6.0)
    assert "rank 1 (place 1) failed with boom" in report["lost"]
    assert report["lost_by"] == {"rank": 1, "place": "place 1", "how": "fails", "cause": "boom", "step": 0}
    assert (report["missing"], report["waiting"], report["rounds_failed"]) == (0, [], 1)


def test_a_failure_that_is_too_long_for_the_wire_is_cut_between_characters():
    cut = decode(encode_failure(StatsdBNError("x" + "é" * limits.MAX_TEXT_BYTES)))
    assert len(cut.message.encode()) == limits.MAX_TEXT_BYTES - 1
    assert set(cut.message[1:]) == {"é"}
