"""The reduction of one round: from the rows of its members to its aggregate."""

from collections.abc import Iterator

from server.rounds.rounds import Round
from statsd_bn.members import NOBODY, Members
from statsd_bn.messages import Aggregate, sound_aggregate
from statsd_bn.reduction import FloatArray, bearers, is_finite, join_in_order, sum_in_order
from statsd_bn.round_key import GATHER


def reduce_round(round_: Round) -> Aggregate:
    """Reduces one complete round: adds all rows in replica order, or joins them in that order if it is a gather.

    Raises:
        LookupError: a contribution is missing.
    """
    rows = round_.rows()
    members = Members.of(round_.futures)
    if round_.key.phase == GATHER:
        return Aggregate(round_.key, len(rows), round_.count, members, join_in_order(rows))
    total = sum_in_order(rows) if len(rows) > 1 else rows[0]
    # Mostly nobody's, so no pairs are made before that is known.
    whose = NOBODY if is_finite(total) else bearers(_by_member(round_))
    return sound_aggregate(round_.key, len(rows), round_.count, members, total, whose)


def _by_member(round_: Round) -> Iterator[tuple[int, FloatArray]]:
    return ((member, future.get().values) for member, future in round_.futures.items())
