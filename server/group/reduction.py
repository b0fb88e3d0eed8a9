"""The reduction of one round: from the rows of its members to its aggregate."""

from server.group.rounds import Round
from statsd_bn.members import Members
from statsd_bn.messages import Aggregate
from statsd_bn.reduction import join_in_order, sum_in_order
from statsd_bn.round_key import GATHER


def reduce_round(round_: Round) -> Aggregate:
    """Reduces one complete round: adds all rows in replica order, or joins them in that order if it is a gather.

    Raises:
        LookupError: a contribution is missing.
    """
    contributions = [future.get() for future in round_.futures.values()]
    rows = [row for contribution in contributions for row in contribution.values]
    combine = join_in_order if round_.key.phase == GATHER else sum_in_order
    total = combine(rows) if len(rows) > 1 else rows[0]
    return Aggregate(round_.key, len(rows), round_.count, Members.of(round_.futures), total)
