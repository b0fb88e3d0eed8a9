"""NaN and infinity in an aggregate: logged once, or refused.

They go from rank to rank through the statistics, so after one round all ranks have them. Each transport says whose rows
had them first.

Gradients may be infinite on purpose: a GradScaler scales them until they overflow, and skips such a step. So a backward
round is never refused, and no finding by itself. A forward round with values that are not finite is one, and what came
in the gradients before it is then logged as well.
"""

import logging
import os
from collections.abc import Mapping

from client.session.connection import NON_FINITE, Connection
from client.session.current import current_connection
from client.session.groups import this_place
from client.session.protocol.member import IGNORE, ON_NONFINITE, RAISE, WARN
from client.transports.in_process import LocalPipe
from client.transports.server import SlavePipe
from client.transports.transport import Transport
from statsd_bn.error_text import MOST_ROWS, Place, Row, error_text
from statsd_bn.errors import ConfigurationError, NonFinite
from statsd_bn.members import rank_in_words, ranks_in_words
from statsd_bn.messages import Aggregate
from statsd_bn.reduction import Rows, is_finite, not_finite
from statsd_bn.round_key import RoundKey, first_non_finite

logger = logging.getLogger("statsd_bn.client")

# What `Connection.told_non_finite` has for gradients, beside `NON_FINITE`.
_GRADIENTS = "gradients"

# Of rounds without a connection; a connection has its own.
_told_here: dict[str, tuple[int, str]] = {}

ADVICE = "Look at what the named ranks compute before this layer; the other ranks have it from their statistics."


def check(transport: Transport, brought: Rows, aggregate: Aggregate) -> None:
    """Tells of an aggregate that is not finite, or refuses it.

    Args:
        transport: it came over.
        brought: this process's rows in it.
        aggregate: any.

    Raises:
        NonFinite: it is one of a forward round and not finite, and the policy is to raise then.
    """
    if aggregate.non_finite.runs:
        _meet(transport, brought, aggregate)


def is_awaited(transport: Transport) -> bool:
    """Whether anything is reported or refused where an aggregate of this transport is not finite."""
    connection = _connection_of(transport)
    policy = _policy(connection)
    return policy == RAISE or (policy == WARN and NON_FINITE not in _told_over(connection))


def raises(transport: Transport, key: RoundKey) -> bool:
    """Whether an aggregate of this round is refused if it is not finite, before anything is made of it."""
    return key.is_forward and _policy(_connection_of(transport)) == RAISE


def _connection_of(transport: Transport) -> Connection | None:
    return transport.connection if isinstance(transport, SlavePipe) else current_connection()


def _told_over(connection: Connection | None) -> dict[str, tuple[int, str]]:
    return _told_here if connection is None else connection.told_non_finite


def _meet(transport: Transport, brought: Rows, aggregate: Aggregate) -> None:
    connection = _connection_of(transport)
    policy = _policy(connection)
    told = _told_over(connection)
    if policy == IGNORE or (policy == WARN and NON_FINITE in told):
        return
    step, gradients = told.get(_GRADIENTS, (-1, ""))
    if not aggregate.key.is_forward:
        if aggregate.key.step > step:  # the first round of a backward pass is where they come from
            # Trainings with a GradScaler begin with some, so no other rank is asked where it runs.
            text = _text(transport, brought, aggregate, _own_place(transport))
            told[_GRADIENTS] = aggregate.key.step, text
            if not gradients:
                logger.info("%s; a GradScaler skips such a step", text)
        return
    if gradients and NON_FINITE not in told:
        logger.warning("%s", gradients)
    told[NON_FINITE] = aggregate.key.step, ""
    if policy == RAISE:
        raise _error(aggregate, _places(transport, aggregate))
    is_own = transport.rank in aggregate.non_finite
    text = _text(transport, brought, aggregate, _own_place(transport) if is_own else transport.places())
    logger.log(logging.ERROR if is_own else logging.WARNING, "%s", text)


def _policy(connection: Connection | None) -> str:
    if connection:
        return connection.member.on_nonfinite
    policy = os.environ.get("STATSD_BN_ON_NONFINITE") or WARN
    if policy not in ON_NONFINITE:
        raise ConfigurationError(
            f"STATSD_BN_ON_NONFINITE: expected one of {', '.join(ON_NONFINITE)}, got {policy!r:.80}"
        )
    return policy


def _own_place(transport: Transport) -> dict[int, str]:
    connection = _connection_of(transport)
    return {transport.rank: connection.member.host_and_pid if connection else this_place()}


def _places(transport: Transport, aggregate: Aggregate) -> dict[int, str]:
    """Returns where the ranks run whose rows were not finite; the others are asked for only where there are any."""
    own = _own_place(transport)
    is_own_alone = list(aggregate.non_finite) == list(own)
    return own if is_own_alone else {**transport.places(), **own}


def _text(transport: Transport, brought: Rows, aggregate: Aggregate, places: Mapping[int, str]) -> str:
    """Returns what is told; this rank tells of itself, with the replica that it was."""
    who = ranks_in_words(aggregate.non_finite, places)
    if transport.rank in aggregate.non_finite:
        who = f"rank {transport.rank} ({places[transport.rank]}{_replicas(brought)})"
        if others := len(aggregate.non_finite) - 1:
            who += f" and {others} more"
    what, has_steps = str(not_finite(aggregate.values)), not isinstance(transport, LocalPipe)
    return first_non_finite(aggregate.key, who, what, has_steps=has_steps)


def _replicas(brought: Rows) -> str:
    """Says which of several replicas of this process it was."""
    if len(brought.counts) == 1:
        return ""
    bearers = [str(number) for number, row in enumerate(brought.values) if not is_finite(row)]
    return f", replica{'s' * (len(bearers) > 1)} {', '.join(bearers)}"


def _error(aggregate: Aggregate, places: Mapping[int, str]) -> NonFinite:
    whose, what = aggregate.non_finite, not_finite(aggregate.values)
    names = [rank_in_words(rank, places) for rank in whose]
    table = [Place([Row((name,)) for name in names[:MOST_ROWS]], len(names), "brought them")]
    text = f"{ranks_in_words(whose)} brought values that are not finite: {what}"
    return NonFinite(
        error_text(text, table=table, where=str(aggregate.key), advice=ADVICE),
        **aggregate.key.fields,
        members=list(whose),
        names=names,
        spoilt_channels=what.spoilt,
        channels=what.channels,
        kinds=list(what.kinds),
    )
