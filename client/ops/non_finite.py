"""NaN and infinity in an aggregate: logged once, or raised as `NonFinite`.

Every rank receives them through the statistics; each transport names the ranks that had them first. A GradScaler
increases its scale until gradients overflow, and skips such a step. So a backward round never raises, and its warning
waits until a forward round has non-finite values too.
"""

import logging
import os
from collections.abc import Mapping

from client.session.connection import NON_FINITE, Connection, current_connection
from client.session.groups import host_and_pid
from client.session.protocol.member import ON_NONFINITE, RAISE, WARN
from client.transports.server import SlavePipe
from client.transports.transport import LocalPipe, Transport
from statsd_bn.errors import ConfigurationError, NonFinite
from statsd_bn.members import format_rank, format_ranks
from statsd_bn.messages import Aggregate
from statsd_bn.reduction import Rows, find_non_finite, is_finite
from statsd_bn.round_key import RoundKey, format_first_non_finite
from statsd_bn.text import MAX_ROWS, Row, TableSection, error_text

logger = logging.getLogger("statsd_bn.client")

# The key of gradients in `Connection.non_finite_reports`, next to `NON_FINITE`.
_GRADIENTS = "gradients"

# The reports of rounds without a connection, like `Connection.non_finite_reports`.
_local_reports: dict[str, tuple[int, str]] = {}

ADVICE = (
    "Check what the named ranks compute before this layer; the other ranks received NaN or infinity through the "
    "statistics."
)


def is_awaited(transport: Transport) -> bool:
    """Whether a non-finite aggregate of this transport would be logged or raised."""
    _, policy, reports = _policy_of(transport)
    return policy == RAISE or (policy == WARN and NON_FINITE not in reports)


def raises(transport: Transport, key: RoundKey) -> bool:
    """Whether a non-finite aggregate of this round raises, before its result is used."""
    return key.is_forward and _policy_of(transport)[1] == RAISE


def check(transport: Transport, contribution: Rows, aggregate: Aggregate) -> None:
    """Log or raise an aggregate that is not finite, as the policy says; `contribution` has this process's rows."""
    if not aggregate.non_finite.runs or not is_awaited(transport):
        return
    connection, policy, reports = _policy_of(transport)
    own_place = {transport.rank: connection.member.host_and_pid if connection else host_and_pid()}
    step, gradients = reports.get(_GRADIENTS, (-1, ""))
    if not aggregate.key.is_forward:
        if aggregate.key.step > step:  # only the first such round of a step shows the origin
            # A training with a GradScaler starts with such steps, so no other rank is asked for its place.
            text = _text(transport, contribution, aggregate, own_place)
            reports[_GRADIENTS] = aggregate.key.step, text
            if not gradients:
                logger.info("%s; a GradScaler skips such a step", text)
        return
    if gradients and NON_FINITE not in reports:
        logger.warning("%s", gradients)
    reports[NON_FINITE] = aggregate.key.step, ""
    if policy == RAISE:
        is_own_alone = list(aggregate.non_finite) == list(own_place)
        raise _error(aggregate, own_place if is_own_alone else {**transport.places(), **own_place})
    is_own = transport.rank in aggregate.non_finite
    text = _text(transport, contribution, aggregate, own_place if is_own else transport.places())
    logger.log(logging.ERROR if is_own else logging.WARNING, "%s", text)


def _policy_of(transport: Transport) -> tuple[Connection | None, str, dict[str, tuple[int, str]]]:
    """The connection, if any, the policy for non-finite aggregates, and the reports so far."""
    connection = transport.connection if isinstance(transport, SlavePipe) else current_connection()
    if connection:
        return connection, connection.member.on_nonfinite, connection.non_finite_reports
    policy = os.environ.get("STATSD_BN_ON_NONFINITE") or WARN
    if policy not in ON_NONFINITE:
        expected = ", ".join(ON_NONFINITE)
        raise ConfigurationError(f"STATSD_BN_ON_NONFINITE: expected one of {expected}, got {policy!r:.80}")
    return None, policy, _local_reports


def _text(transport: Transport, contribution: Rows, aggregate: Aggregate, places: Mapping[int, str]) -> str:
    """The log line; a rank that is an origin itself names its replicas."""
    who = format_ranks(aggregate.non_finite, places)
    if transport.rank in aggregate.non_finite:
        who = f"rank {transport.rank} ({places[transport.rank]}{_replicas(contribution)})"
        if others := len(aggregate.non_finite) - 1:
            who += f" and {others} more"
    what, has_steps = str(find_non_finite(aggregate.values)), not isinstance(transport, LocalPipe)
    return format_first_non_finite(aggregate.key, who, what, has_steps=has_steps)


def _replicas(contribution: Rows) -> str:
    if len(contribution.counts) == 1:
        return ""
    bearers = [str(number) for number, row in enumerate(contribution.values) if not is_finite(row)]
    return f", replica{'s' * (len(bearers) > 1)} {', '.join(bearers)}"


def _error(aggregate: Aggregate, places: Mapping[int, str]) -> NonFinite:
    bearers, what = aggregate.non_finite, find_non_finite(aggregate.values)
    names = [format_rank(rank, places) for rank in bearers]
    table = [TableSection([Row((name,)) for name in names[:MAX_ROWS]], len(names), "sent them")]
    text = f"{format_ranks(bearers)} sent non-finite values: {what}"
    return NonFinite(
        error_text(text, table=table, where=str(aggregate.key), advice=ADVICE),
        **aggregate.key.fields,
        members=list(bearers),
        names=names,
        non_finite_channels=what.number,
        channels=what.channels,
        kinds=list(what.kinds),
    )
