"""Joining a job without an endpoint: member 0 starts a master, and the others ask it where."""

import logging
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TYPE_CHECKING

from client import launcher
from client.launcher import MeetingPlace
from client.meeting import Meeting, News
from client.own_master import OwnMaster
from client.session import Member
from statsd_bn.errors import AuthenticationRefused, ConfigurationError, GroupIncomplete, ServerUnreachable
from statsd_bn.keys import ClientKeys, parse_client

if TYPE_CHECKING:
    from client.connection import Connection

logger = logging.getLogger("statsd_bn.client")

LOOPBACK = "tcp://127.0.0.1:*"

# How long member 0 may need longer than another process to come so far after both have been started anew. Until it has,
# the store still tells of the master before, which is gone.
ANEW_SECONDS = 30.0

Join = Callable[[str, ClientKeys | None, Member], "Connection"]
"""Joins a job: where its master listens, the keys for it, and who this process is."""


def join(who: Member, environ: Mapping[str, str], join_at: Join) -> "Connection":
    """Returns a connection to the master that member 0 starts for this job.

    Raises:
        ConfigurationError: the environment does not say who this process is and where the processes meet, or not the
            same as that of member 0.
        ServerUnreachable: there is no master, with the reason.
    """
    place = launcher.meeting_place(environ)
    if place is None or (who.world_size == 1 and launcher.world_size(environ) is None):
        raise ConfigurationError(
            "endpoint: none given, STATSD_BN_ENDPOINT is not set, and no launcher has said how the processes meet "
            "(RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); start the script by torchrun, or start `python -m server` "
            "and pass what it prints"
        )
    is_one_node = launcher.is_one_node(environ, place, who.world_size)
    life = _life(who, environ, is_one_node=is_one_node)

    def meet() -> Meeting:
        return Meeting(place, who.member, who.world_size, f"job {who.job}/{life}", who.patience)

    if who.member == 0:
        return _with_own_master(who, place, meet, join_at, is_one_node=is_one_node)
    return _with_that_of_member_0(who, meet, join_at, is_one_node=is_one_node)


def _with_own_master(
    who: Member, place: MeetingPlace, meet: Callable[[], Meeting], join_at: Join, *, is_one_node: bool
) -> "Connection":
    bind = LOOPBACK if is_one_node else binding(place.address)
    try:
        master = OwnMaster(bind, with_keys=not is_one_node, patience=who.deadline)
    except ServerUnreachable as error:
        meet().tell(News(problem=f"{who.place}: {error}"))
        raise
    try:
        endpoint = master.endpoint if is_one_node else reached_by(place.address, master.endpoint)
        meet().tell(News(endpoint, who.epoch, master.key_file))
        return join_at(endpoint, _keys(master.key_file), who)
    except GroupIncomplete:
        # The others' time is over as well: each is told for whom it waited, and the master ends when they have left.
        raise
    except BaseException:
        master.stop()
        raise


def _with_that_of_member_0(
    who: Member, meet: Callable[[], Meeting], join_at: Join, *, is_one_node: bool
) -> "Connection":
    meeting = meet()
    news = meeting.hear()
    while True:
        if news.problem:
            raise ServerUnreachable(f"member 0 could not start a master: {news.problem}", endpoint="")
        if not is_one_node and not news.key_file:
            # Some launchers give the process that the others come to "localhost" for its own address.
            raise ConfigurationError(
                "MASTER_ADDR: expected the same on all processes; by this one's they are on several hosts, but member "
                f"0 takes all to be on its own, and its master listens at {news.endpoint}. Give member 0 the name or "
                "address by which the others reach it"
            )
        try:
            # torchrun counts restarts on each node by itself, so that of member 0 is everybody's.
            return join_at(news.endpoint, _keys(news.key_file), replace(who, epoch=news.epoch))
        except (ServerUnreachable, AuthenticationRefused) as error:
            if is_one_node:
                raise
            logger.warning("%s; waiting whether member 0 was started anew, and tells of another master", error)
            try:
                news = meeting.hear(news, ANEW_SECONDS)
            except ServerUnreachable:
                raise error from None


def _life(who: Member, environ: Mapping[str, str], *, is_one_node: bool) -> str:
    """Returns what tells the meetings of this life from those before, in a store that outlives the processes.

    That is torchrun's, for those that it starts anew. On one node all know how often it has.
    """
    return f"life {who.epoch}" if is_one_node and environ.get("TORCHELASTIC_RESTART_COUNT") else "latest life"


def _keys(key_file: str) -> ClientKeys | None:
    return parse_client(key_file, "the key that member 0 has made") if key_file else None


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
