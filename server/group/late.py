"""Late: who has not come to a round, and who waits there, as a table for people."""

from collections.abc import Mapping, Sequence

from server.group.rounds import Round
from server.group.slave import Slave
from statsd_bn.error_text import MOST_ROWS, Place, Row


def table(now: float, round_: Round, slaves: Mapping[int, Slave], missing: Sequence[int]) -> list[Place]:
    """Ranks that a round waits for, and those that wait in it.

    Args:
        now: the time, on the clock of the master.
        round_: the round.
        slaves: of the group, by number.
        missing: whom the round waits for.
    """
    where = round_.key.in_words(with_call=round_.key.call > 0)
    waiting = round_.waiting
    late = [_late(now, one, slaves, where) for one in missing[:MOST_ROWS]]
    there = [_waiting(now, one, round_, slaves, where) for one in waiting[:MOST_ROWS]]
    return [
        *([Place(late, len(missing), "that have not come")] if late else []),
        *([Place(there, len(waiting), f"in {where}")] if there else []),
    ]


def _late(now: float, member: int, slaves: Mapping[int, Slave], where: str) -> Row:
    name = _name(member, slaves)
    seen = slaves[member].where(now) if member in slaves else ""
    return Row((name, "has not come", f"to {where}"), (f"{name} {seen}",) if seen else ())


def _waiting(now: float, member: int, round_: Round, slaves: Mapping[int, Slave], where: str) -> Row:
    return Row((_name(member, slaves), f"waits {now - round_.futures[member].since:.1f} s", f"in {where}"))


def _name(member: int, slaves: Mapping[int, Slave]) -> str:
    """Whoever has contributed may have left since."""
    return str(slaves[member]) if member in slaves else f"rank {member}"
