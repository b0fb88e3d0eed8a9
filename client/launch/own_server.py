"""Joining a job without an endpoint: member 0 starts a master, and the others ask it where."""

import logging
import math
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TYPE_CHECKING

from client.connection.member import Member
from client.launch import job_secret
from client.launch.launchers import StoreAddress
from client.launch.server_process import OwnMaster
from client.launch.settings import Settings
from client.launch.store import Meeting, News
from statsd_bn.errors import AuthenticationRefused, ConfigurationError, GroupIncomplete, ServerUnreachable
from statsd_bn.keys import ClientKeys
from statsd_bn.private_folder import check_private
from statsd_bn.reach import ipc_path

if TYPE_CHECKING:
    from client.connection.connection import Connection

logger = logging.getLogger("statsd_bn.client")

# How long member 0 may need longer than another process to come so far after both have been started anew. Until it has,
# the store still tells of the master before, which is gone.
ANEW_SECONDS = 30.0

# Keys from another secret are refused like those of a stranger.
OTHER_SECRET_HINT = "Do all processes have the same STATSD_BN_SECRET?"  # noqa: S105 - a question

Join = Callable[[str, ClientKeys | None, Member], "Connection"]
"""Joins a job: where its master listens, the keys for it, and who this process is."""


def join(settings: Settings, store: StoreAddress, environ: Mapping[str, str], join_at: Join) -> "Connection":
    """Returns a connection to the server that rank 0 starts for this job, and announces in torch's store.

    Raises:
        ConfigurationError: this process is set up otherwise than rank 0, or the job runs on several nodes and has no
            secret.
        ServerUnreachable: there is no server, with the reason.
    """
    is_one_node = settings.is_one_node
    # Before the store is asked: without a secret all processes say so at once.
    secret = None if is_one_node else job_secret.given(environ)
    who = settings.member()
    life = _life(settings)

    def meet() -> Meeting:
        return Meeting(store, who.rank, who.world_size, f"job {who.job}/{life}", who.seconds_to_join)

    if is_one_node:
        return _with_own_master(who, "", News(), meet, join_at) if who.rank == 0 else _on_one_node(who, meet, join_at)
    if who.rank == 0:
        made = "" if secret else job_secret.make()
        return _with_own_master(who, store.host, News(secret=made), meet, join_at, secret or made)
    return _on_several_nodes(who, secret, meet, join_at)


def _with_own_master(
    who: Member, address: str, news: News, meet: Callable[[], Meeting], join_at: Join, secret: str = ""
) -> "Connection":
    """Starts a master, for other hosts at `address` or, without one, for this host, and tells of it."""
    keys = job_secret.member_keys(secret, who.job) if secret else None
    try:
        master = OwnMaster(
            binding(address) if address else None,
            keys=job_secret.server_keys(secret, who.job) if secret else None,
            patience=who.round_timeout,
        )
    except (ServerUnreachable, ConfigurationError) as error:
        meet().tell(News(problem=f"{who.host_and_pid}: {error}"))
        raise
    try:
        endpoint = reached_by(address, master.endpoint) if address else master.endpoint
        meet().tell(replace(news, endpoint=endpoint, epoch=who.epoch))
        return join_at(endpoint, keys, who)
    except GroupIncomplete:
        # The others' time is over as well: each is told for whom it waited, and the master ends when they have left.
        raise
    except BaseException:
        master.stop()
        raise


def _on_one_node(who: Member, meet: Callable[[], Meeting], join_at: Join) -> "Connection":
    news = _heard(meet())
    path = ipc_path(news.endpoint)
    if path is None:
        raise _not_the_same(news, "all processes are on its host", "they are on several")
    try:
        path.parent.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigurationError(
            f"endpoint: expected one, since member 0's server listens at {news.endpoint}, and this process sees no "
            "such folder. They may be in different containers: start `python -m server` where all reach it"
        ) from error
    except OSError:
        # The check below says what keeps this process from it.
        pass
    # Whoever can write to the store can name a server of another user's.
    check_private(path.parent)
    return join_at(news.endpoint, None, replace(who, epoch=news.epoch))


def _on_several_nodes(who: Member, secret: str | None, meet: Callable[[], Meeting], join_at: Join) -> "Connection":
    meeting = meet()
    news = _heard(meeting)
    while True:
        if ipc_path(news.endpoint):
            # Some launchers give the process that the others come to "localhost" for its own address.
            raise _not_the_same(news, "they are on several hosts", "all are on its own")
        if bool(secret) == bool(news.secret):
            has, tells = ("a", "one") if secret else ("no", "none")
            raise ConfigurationError(
                "STATSD_BN_SECRET_FILE, STATSD_BN_SECRET, STATSD_BN_SECRET_IN_STORE: expected the same on all "
                f"processes, but this one has {has} secret, and member 0 tells {tells}"
            )
        try:
            # torchrun counts restarts on each node by itself, so that of member 0 is everybody's.
            keys = job_secret.member_keys(secret or news.secret, who.job)
            return join_at(news.endpoint, keys, replace(who, epoch=news.epoch))
        except (ServerUnreachable, AuthenticationRefused) as error:
            logger.warning("%s; waiting whether member 0 was started anew, and tells of another master", error)
            try:
                news = _heard(meeting, news, ANEW_SECONDS)
            except ServerUnreachable:
                text = f"{error}. {OTHER_SECRET_HINT}" if secret else str(error)
                raise type(error)(text, **error.fields) from None


def _heard(meeting: Meeting, known: News | None = None, seconds: float = math.inf) -> News:
    """Returns the news of member 0, where they are good."""
    news = meeting.hear(known, seconds)
    if news.problem:
        raise ServerUnreachable(f"member 0 could not start a master: {news.problem}", endpoint="")
    return news


def _not_the_same(news: News, here: str, there: str) -> ConfigurationError:
    return ConfigurationError(
        f"MASTER_ADDR: expected the same on all processes; by this one's {here}, but member 0 takes it that {there}, "
        f"and its master listens at {news.endpoint}. Give member 0 the name or address by which the others reach it"
    )


def _life(settings: Settings) -> str:
    """Returns what tells this life of the job from earlier ones, in a store that outlives the processes.

    Only torchrun's store does, and on one node its count of restarts is the same for all processes.
    """
    is_counted = settings.is_one_node and settings.epoch.source == "TORCHELASTIC_RESTART_COUNT"
    return f"life {settings.epoch.value}" if is_counted else "latest life"


def binding(address: str) -> str:
    """Returns where a master listens that other hosts reach at `address`: there, if that is an address of this host.

    Else on all interfaces: the name may mean another address here, such as 127.0.1.1, and addresses may be translated.
    """
    for candidate in _addresses(address):
        if not candidate.is_loopback and _is_of_this_host(candidate):
            return f"tcp://{_quoted(str(candidate))}:*"
    return f"tcp://{_quoted('::' if ':' in address else '0.0.0.0')}:*"  # noqa: S104 - with keys only


def reached_by(address: str, endpoint: str) -> str:
    """Returns the endpoint by which other hosts reach a server that listens at `endpoint`."""
    return f"tcp://{_quoted(address)}:{endpoint.rpartition(':')[2]}"


def _quoted(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _addresses(name: str) -> list[IPv4Address | IPv6Address]:
    """Returns what a name means here; of a name only what ZeroMQ looks up, which is IPv4."""
    with suppress(ValueError):
        return [ip_address(name)]
    try:
        return [ip_address(found[4][0]) for found in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)]
    except (OSError, UnicodeError):  # that of a name that cannot be one, such as "a..b"
        return []


def _is_of_this_host(address: IPv4Address | IPv6Address) -> bool:
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET  # noqa: PLR2004 - the versions of IP
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind((str(address), 0))
    except OSError:
        return False
    return True
