"""What people are told of members whose data differ."""

from collections.abc import Sequence

from statsd_bn.skew.comparison import Found
from statsd_bn.skew.copies import Same
from statsd_bn.skew.few import Apart, Changed
from statsd_bn.skew.outliers import Different


def in_words(found: Found, names: Sequence[str]) -> str:
    """What was found, in one line.

    Args:
        found: by a `Comparison`.
        names: of the members, for people.
    """
    match found:
        case Different():
            return _different(names[found.member], found)
        case Same():
            return _same(names[found.member], names[found.other], found)
        case Changed():
            return _changed(names[found.member], found)
        case Apart():
            return _apart(" and ".join(names), found)


def _different(who: str, found: Different) -> str:
    others = (
        f"{found.eta2:.2g} of the variance lies between ranks, {found.part:.2g} by this one and {found.usual:.2g} by "
        f"another as a rule; its own variance is {found.variance:.2g} times theirs, and its means lie "
        f"{found.shift:.2g} standard deviations to one side"
    )
    return f"{who} differs from the other ranks since step {found.since}: {found.layer} ({others}){_more(found.layers)}"


def _same(who: str, other: str, found: Same) -> str:
    return (
        f"{who} has brought the same statistics as {other} in every layer since step {found.since}: "
        "both may read the same part of the data"
    )


def _changed(who: str, found: Changed) -> str:
    own, others = found.own, found.others
    now = (
        f"its variance is {own.variance:.2g} times what it was, its mean lies {own.shift:.2g} standard deviations from "
        f"where it was, and both vary {own.scatter:.2g} times as much from look to look; of the others at most "
        f"{others.variance:.2g} times, {others.shift:.2g} and {others.scatter:.2g} times"
    )
    return f"{who} has changed since step {found.since}, unlike the others: {found.layer} ({now}){_more(found.layers)}"


def _apart(both: str, found: Apart) -> str:
    how = (
        f"the variance of the first is {found.variance:.2g} times that of the second, and their means lie up to "
        f"{found.shift:.2g} standard deviations apart"
    )
    return (
        f"{both} read different data, and of two ranks nobody can tell which is the odd one, since step "
        f"{found.since}: {found.layer} ({how}){_more(found.layers)}"
    )


def _more(layers: int) -> str:
    return f", the earliest of {layers} layers" if layers > 1 else ""
