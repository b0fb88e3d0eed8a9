"""Late: who has not come to a round, and who waits there, for people."""

from collections.abc import Mapping, Sequence

from server.membership.contributor import Contributor
from server.rounds.rounds import Round
from statsd_bn.error_text import MOST_ROWS, Place, Row


def table(now: float, round_: Round, contributors: Mapping[int, Contributor], missing: Sequence[int]) -> list[Place]:
    """Ranks that a round waits for, and those that wait in it.

    Args:
        now: the time, on the clock of the server.
        round_: the round.
        contributors: of the group, by number.
        missing: whom the round waits for.
    """
    where = round_.key.in_words(with_call=round_.key.call > 0)
    waiting = round_.waiting
    late = [_late(now, one, contributors, where) for one in missing[:MOST_ROWS]]
    there = [_waiting(now, one, round_, contributors, where) for one in waiting[:MOST_ROWS]]
    return [
        *([Place(late, len(missing), "that have not come")] if late else []),
        *([Place(there, len(waiting), f"in {where}")] if there else []),
    ]


def _late(now: float, member: int, contributors: Mapping[int, Contributor], where: str) -> Row:
    name = _name(member, contributors)
    seen = contributors[member].where(now) if member in contributors else ""
    return Row((name, "has not come", f"to {where}"), (f"{name} {seen}",) if seen else ())


def _waiting(now: float, member: int, round_: Round, contributors: Mapping[int, Contributor], where: str) -> Row:
    return Row((_name(member, contributors), f"waits {now - round_.futures[member].since:.1f} s", f"in {where}"))


def _name(member: int, contributors: Mapping[int, Contributor]) -> str:
    """Whoever has contributed may have left since."""
    return str(contributors[member]) if member in contributors else f"rank {member}"
