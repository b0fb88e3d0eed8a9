"""What a process group's first rank tells of its rounds, which no server sees: whose data differ, and whose are NaN.

It has the rows of all ranks. If it has a connection as well, to a job of the same ranks, it tells the server, so that
the log, `status` and the view have it. Without one, a thread beside the training compares the ranks once a second by
the server's rules, and warns. Each rank says in any case whose NaN it was, see `client.ops.non_finite`.
"""

import logging
import threading
import time
import weakref
from collections.abc import Mapping, Sequence

import numpy as np

from client.session.connection import Connection
from client.session.current import current_connection
from statsd_bn.members import rank_in_words
from statsd_bn.messages import Aggregate, NonFiniteRound
from statsd_bn.reduction import not_finite
from statsd_bn.round_key import RoundKey
from statsd_bn.skew import Comparison
from statsd_bn.skew_samples import SECONDS, Samples, told_by
from statsd_bn.wire import encode

logger = logging.getLogger("statsd_bn.client")


class ToServer:
    """Tells a server; the heartbeats take what is in the samples.

    Args:
        connection: to a job of the ranks of the process group.

    Attributes:
        samples: takes rows of rounds.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        transport = connection.session(None).transport
        self.samples = transport.samples = transport.samples or Samples()
        self._told: set[str] = set()

    def tell(self, aggregate: Aggregate) -> None:
        """Tell of an aggregate that is not finite, the first forward and the first backward."""
        key, connection = aggregate.key, self._connection
        if key.phase in self._told or connection.closed:
            return
        self._told.add(key.phase)
        who, session = connection.member, connection.session(None)
        what = str(not_finite(aggregate.values))
        of_job = RoundKey(who.job, session.member.group, who.epoch, key.step, key.layer, key.call, key.phase)
        with connection.channel_pool.channel() as channel:
            channel.send(encode(NonFiniteRound(session.token, of_job, aggregate.non_finite, what)))


class Here:
    """Looks itself, and warns.

    Args:
        name: of the process group, for people.
        ranks: of the group, in its order.
        places: where they run, by number; filled by whoever gets to know it.

    Attributes:
        samples: takes rows of rounds.
    """

    def __init__(self, name: str, ranks: Sequence[int], places: Mapping[int, str]) -> None:
        self.samples = Samples()
        self._name = name
        self._ranks, self._places = ranks, places
        self._comparison = Comparison(len(ranks))

    def tell(self, aggregate: Aggregate) -> None:
        """Nothing: each rank says for itself that an aggregate is not finite."""

    def look(self, now: float) -> None:
        """Compare the ranks by what has come, and warn of what is news."""
        if told := told_by(self.samples.take(now)):
            step, figures = told
            names = [rank_in_words(rank, self._places) for rank in self._ranks]
            for found in self._comparison.look(now, step, list(figures), np.stack(list(figures.values()))):
                logger.warning("process group %r: skew: %s", self._name, found.in_words(names))

    def start(self) -> None:
        """Look once a second, in a thread that ends when nobody keeps this any more."""
        threading.Thread(target=_look_on, args=(weakref.ref(self),), name="statsd_bn skew", daemon=True).start()


def insight_of(name: str, ranks: Sequence[int], index: int, places: Mapping[int, str]) -> ToServer | Here | None:
    """Returns what takes the rows of a process group's rounds on this rank; None on all but the first.

    Args:
        name: of the process group, for people.
        ranks: of the group, in its order.
        index: which of them this process is.
        places: see `Here`.
    """
    if index:
        return None
    connection = current_connection()
    if connection and _is_of_the_same_ranks(connection, ranks):
        return ToServer(connection)
    here = Here(name, ranks, places)
    here.start()
    return here


def _is_of_the_same_ranks(connection: Connection, ranks: Sequence[int]) -> bool:
    has_server = not (connection.is_in_process or connection.closed)
    return has_server and not connection.member.is_elastic and connection.members == list(ranks)


def _look_on(ref: "weakref.ref[Here]") -> None:
    while (here := ref()) is not None:
        try:
            here.look(time.monotonic())
        except Exception:  # whatever is wrong with the numbers must not end the looks
            logger.debug("a look at the ranks' data has failed", exc_info=True)
        del here
        time.sleep(SECONDS / 2)
