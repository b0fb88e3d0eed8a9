"""`python -m server status` and `check`: ask a running server what it is doing, or whether it is there."""

import json
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import zmq

from server.cli.query import ANSWER_SECONDS, asking
from server.config import bound_to
from statsd_bn import limits
from statsd_bn.checks import check_integer
from statsd_bn.endpoints import find_server
from statsd_bn.error_text import in_log
from statsd_bn.errors import AuthenticationRefused, ConfigurationError, ProtocolError, ServerUnreachable, from_wire
from statsd_bn.keys import ClientKeys
from statsd_bn.members import Members, ranks_in_words
from statsd_bn.messages import WORLD, Failure, Status, StatusRequest, missing_members
from statsd_bn.text import plain, readable_within
from statsd_bn.wire import decode

# Counts of the report, shown where they are not 0.
COUNTS = {
    "over_limits": "messages over a limit",
    "strangers": "messages of unknown sessions",
    "refused_connections": "connections refused",
    "idle_connections": "idle connections closed",
    "flooding_connections": "flooding connections closed",
    "dropped_answers": "answers dropped",
}

# How many members a group of a report has, or had, lacks, and has besides those that the report names.
SIZES = ("world_size", "missing", "members_left_out")

# What a report raises that is not as this version expects it.
UNSOUND = (KeyError, TypeError, ValueError, AttributeError, ProtocolError)

# A server is asked from its own host, where it answers in milliseconds; a loaded one may take longer. A prober must
# wait longer than this, or it does not learn the reason.
CHECK_SECONDS = 3.0

# A server that was just started in the background listens within a second.
FIND_SECONDS = 2.0
FIND_PAUSE_SECONDS = 0.05

# Ranks arrive some moments apart in each round; a wait is worth a line from this length on.
WAIT_SECONDS = 0.5

# Names for all addresses of a host when listening, each with the address that always exists.
ALL_ADDRESSES = {"0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - nothing is bound here


def ask(endpoint: str, seconds: float = ANSWER_SECONDS, keys: ClientKeys | None = None) -> dict[str, Any]:
    """Report of the server at `endpoint`.

    Args:
        endpoint: where it listens.
        seconds: how long it may take.
        keys: this client's, and the server's public one; None for a server that asks for none.

    Raises:
        AuthenticationRefused: server and client do not accept each other's keys.
        ConfigurationError: this is not an endpoint, or a socket that may be another user's.
        ServerUnreachable: no answer within `seconds`, or it is closed to this user.
    """
    with asking(endpoint, seconds, keys) as question:
        return report_of(endpoint, question(StatusRequest()))


def report_of(endpoint: str, frame: bytes) -> dict[str, Any]:
    """Report that a frame from the server at `endpoint` carries.

    Raises:
        AuthenticationRefused: the server does not accept this client's key.
        ServerUnreachable: it carries none.
    """
    try:
        answer = decode(frame)
    except ProtocolError as error:
        raise ServerUnreachable(f"{endpoint} gave no status: {error.message}", endpoint=endpoint) from error
    if isinstance(answer, Failure) and answer.code == AuthenticationRefused.code:
        raise from_wire(answer.code, answer.message, answer.fields)
    if not isinstance(answer, Status):
        text = answer.message if isinstance(answer, Failure) else type(answer).__name__
        raise ServerUnreachable(f"{endpoint} gave no status: {text}", endpoint=endpoint)
    report: dict[str, Any] = readable_within(answer.report)
    try:
        _check_sizes(report)
    except UNSOUND as error:
        raise unsound(error) from error
    return report


def _check_sizes(report: dict[str, Any]) -> None:
    """Refuse numbers of members that no group can have: who reads the report lists the members that are missing."""
    for told in (*report["groups"], *report.get("ended", ())):
        for name in (name for name in SIZES if name in told):
            check_integer(name, told[name], 0, limits.MAX_MEMBERS)


def own_endpoint(environ: Mapping[str, str]) -> str:
    """Endpoint of the server that listens on this host as `environ` says; the first of several.

    Raises:
        ConfigurationError: `environ` names no endpoint, or one whose port only the server knows.
        ServerUnreachable: `environ` says nothing, and this user has no server.
    """
    if not environ.get("STATSD_BN_BIND", "").strip(" ,"):
        return _find_server(environ)
    endpoint = next(iter(bound_to(environ)), "")
    scheme, _, address = endpoint.partition("://")
    if scheme == "ipc":
        return endpoint
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise ConfigurationError(f"ENDPOINT: expected, since STATSD_BN_BIND names none with a port but {endpoint!r}")
    return f"{scheme}://{_address_of(host)}:{port}"


def _address_of(host: str) -> str:
    """Where to reach what listens at a host's address or name, at all addresses, or at those of an interface."""
    if host not in {name for _, name in socket.if_nameindex()}:
        return ALL_ADDRESSES.get(host, host)
    with zmq.Context() as context, context.socket(zmq.PAIR) as found:
        # ZeroMQ takes an interface's name to listen, and none to connect.
        try:
            found.bind(f"tcp://{host}:*")
        except zmq.ZMQError as error:
            problem = zmq.strerror(error.errno or 0)
            text = f"STATSD_BN_BIND: expected an interface with an address, got {host!r} ({problem})"
            raise ConfigurationError(text) from error
        address = found.getsockopt_string(zmq.LAST_ENDPOINT)
    return address.removeprefix("tcp://").rpartition(":")[0]


def _find_server(environ: Mapping[str, str]) -> str:
    expiry = time.monotonic() + FIND_SECONDS
    while True:
        try:
            return find_server(environ)
        except ServerUnreachable:
            if time.monotonic() >= expiry:
                raise
        time.sleep(FIND_PAUSE_SECONDS)


def unsound(error: BaseException) -> ServerUnreachable:
    """Error that tells that a report makes no sense."""
    what = error.message if isinstance(error, ProtocolError) else type(error).__name__
    return ServerUnreachable(f"expected a status report of this version, got one that makes no sense: {what}")


def describe(report: dict[str, Any]) -> str:
    """A report as text for people.

    Raises:
        ServerUnreachable: it makes no sense.
    """
    try:
        return _describe(report)
    except UNSOUND as error:
        raise unsound(error) from error


def _describe(report: dict[str, Any]) -> str:
    head = (
        f"server {report['server']}, up {report['seconds']:.0f} s, "
        f"{report['received']} messages, {report['bad_frames']} bad frames"
    )
    lines = [head]
    if counts := [f"{report[name]} {text}" for name, text in COUNTS.items() if report.get(name)]:
        lines.append(f"  {', '.join(counts)}")
    for group in report["groups"]:
        lines += _describe_group(group)
    ended = [_describe_ended(job) for job in report.get("ended", ())]
    if report.get("left_out"):
        lines.append(f"and {report['left_out']} groups more than this report tells of")
    elif not report["groups"]:
        lines.append("no jobs now" if ended else "no jobs")
    lines += ended
    return "\n".join(map(plain, lines))


def _describe_group(group: dict[str, Any]) -> list[str]:
    state = "open"
    if group["lost"]:
        state = f"broken: {_without_place(group['lost'], group)}"
    elif group["missing"] and group.get("members_left_out"):
        state = f"waiting for {group['missing']} ranks"
    elif group["missing"]:
        present = Members.of(told["member"] for told in group["members"])
        state = f"waiting for {missing_members(group['group'], group['world_size'], present, group['missing'])}"
    # A job that broke between two rounds has none that failed; a 0 beside its reason would read as a denial.
    failed = f", {group['rounds_failed']} failed" if group["rounds_failed"] else ""
    head = (
        f"job {group['job']!r}, group {group['group']!r}, epoch {group['epoch']}: "
        f"{len(group['members']) + group.get('members_left_out', 0)} of {group['world_size']} ranks, {state}; "
        f"{group['rounds_done']} rounds done{failed}"
    )
    lines = [head, *(f"  {text}" for text in group.get("non_finite", ()))]
    lines += [f"  {finding['kind']}: {finding['text']}" for finding in group.get("findings", ())]
    lines += [
        f"  rank {told['member']} ({told['place']}), step {told['step']}, {told['replicas']} "
        f"replica{'s' * (told['replicas'] != 1)}" + (f"; it {told['where']}" if told.get("where") else "")
        for told in group["members"]
    ]
    lines += _describe_transports(group)
    if left_out := group.get("members_left_out"):
        lines.append(f"  and {left_out} ranks more than a report can hold")
    lines += [
        f"  waiting {round_['seconds']:.1f} s for {_missing(round_)}: {round_['round']}"
        for round_ in group["waiting"]
        if round_["seconds"] >= WAIT_SECONDS
    ]
    if left_out := group.get("waiting_left_out"):
        lines.append(f"  and {left_out} rounds more than a report can hold")
    return lines


def _describe_transports(group: dict[str, Any]) -> list[str]:
    """How the members' rows travel, one line; none before they have said so."""
    users: dict[str, list[int]] = {}
    for told in group["members"]:
        if transport := told.get("transport"):
            users.setdefault(transport, []).append(told["member"])
    if not users:
        return []
    told = [
        transport if len(users) == 1 else f"{transport} of {ranks_in_words(Members.of(ranks))}"
        for transport, ranks in users.items()
    ]
    why = group.get("why_not_faster")
    return [f"  transport {', '.join(told)}" + (f": {why}" if why else "")]


def _describe_ended(job: dict[str, Any]) -> str:
    how = f"broken: {_without_place(job['lost'], {'group': WORLD, **job})}" if job["lost"] else "in good order"
    return (
        f"job {job['job']!r}, epoch {job['epoch']}: ended {job['seconds']:.0f} s ago, {how}; "
        f"{job['world_size']} ranks, {job['rounds_done']} rounds done"
    )


def _without_place(text: str, of: dict[str, Any]) -> str:
    """A text about a group, for a line that says already which group."""
    return text.replace(f"in job {of['job']!r}, group {of['group']!r}, ", "in ")


def _missing(round_: dict[str, Any]) -> str:
    left_out = round_.get("missing_left_out")
    return ranks_in_words(Members.of(round_["missing"])) + (f" and {left_out} more" if left_out else "")


PERIOD_SECONDS = 1.0

# To a terminal: to the top left; clear the rest of a line; clear all below. Each line is written over the last one, so
# that nothing flickers.
_HOME, _END_OF_LINE, _BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
_CLEAR = "\x1b[2J"


def as_json(report: dict[str, Any]) -> str:
    """A report on one line, for a program."""
    return json.dumps(report, ensure_ascii=False, sort_keys=True)


def watch(text: Callable[[], str], out: TextIO | None = None, pause: Callable[[float], None] = time.sleep) -> None:
    """Shows a text every second, until Ctrl-C.

    Args:
        text: returns what to show now. A server that does not answer later on is told in its place.
        out: where to; default: the standard output.
        pause: waits for so many seconds.

    Raises:
        ServerUnreachable: there was no server from the beginning.
    """
    out = out or sys.stdout
    is_terminal = out.isatty()
    try:
        shown = text()
        if is_terminal:
            out.write(_CLEAR)
        while True:
            out.write(_over(shown) if is_terminal else f"{shown}\n")
            out.flush()
            pause(PERIOD_SECONDS)
            shown = _or_error(text)
    except KeyboardInterrupt:
        out.write("\n" if is_terminal else "")


def _over(text: str) -> str:
    lines = "".join(f"{line}{_END_OF_LINE}\n" for line in text.split("\n"))
    return f"{_HOME}{lines}{_BELOW}"


def _or_error(text: Callable[[], str]) -> str:
    try:
        return text()
    except ServerUnreachable as error:
        return in_log(error)
