"""`python -m server status` and `check`: request and print the status of a running server."""

import json
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import zmq

from server.cli.query import ANSWER_SECONDS, query_connection
from server.config import bind_endpoints
from statsd_bn import limits
from statsd_bn.checks import check_integer
from statsd_bn.endpoints import find_server
from statsd_bn.errors import AuthenticationRefused, ConfigurationError, ProtocolError, ServerUnreachable, from_wire
from statsd_bn.keys import ClientKeys
from statsd_bn.members import Members, format_ranks
from statsd_bn.messages import WORLD, Failure, Status, StatusRequest, format_missing_members
from statsd_bn.text import escape, escape_nested, log_line
from statsd_bn.wire import decode

# Counters of the report, printed if they are not 0.
COUNTS = {
    "over_limits": "messages over a limit",
    "strangers": "messages of unknown sessions",
    "refused_connections": "connections refused",
    "idle_connections": "idle connections closed",
    "flooding_connections": "flooding connections closed",
    "dropped_answers": "answers dropped",
}

# Numbers of members in a group's entry.
SIZES = ("world_size", "missing", "members_left_out")

# Exceptions while reading a malformed report.
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, ProtocolError)

# Timeout of `check`: a server answers its own host within milliseconds, a loaded one later. Give a health probe more
# time, or it ends before `check` prints the reason.
CHECK_SECONDS = 3.0

# A server that was just started in the background listens within one second.
FIND_SECONDS = 2.0
FIND_PAUSE_SECONDS = 0.05

# Shorter waits are normal, because ranks arrive at different times, and are not printed.
WAIT_SECONDS = 0.5

# Wildcard addresses for listening, each with a loopback address to connect to.
ALL_ADDRESSES = {"0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - nothing is bound here


def ask(endpoint: str, seconds: float = ANSWER_SECONDS, keys: ClientKeys | None = None) -> dict[str, Any]:
    """Report of the server at `endpoint`.

    Raises:
        AuthenticationRefused: server and client do not accept each other's keys.
        ConfigurationError: the endpoint is invalid, or its socket may belong to another user.
        ServerUnreachable: no answer within `seconds`, or no permission to connect.
    """
    with query_connection(endpoint, seconds, keys) as question:
        return report_of(endpoint, question(StatusRequest()))


def report_of(endpoint: str, frame: bytes) -> dict[str, Any]:
    """Report in a frame from the server at `endpoint`.

    Raises:
        AuthenticationRefused: the server does not accept this client's key.
        ServerUnreachable: the frame has no valid report.
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
    report: dict[str, Any] = escape_nested(answer.report)
    try:
        _check_sizes(report)
    except MALFORMED as error:
        raise malformed_report(error) from error
    return report


def _check_sizes(report: dict[str, Any]) -> None:
    """Refuse impossible numbers of members: a reader of the report would list all missing ones."""
    for entry in (*report["groups"], *report.get("ended", ())):
        for name in (name for name in SIZES if name in entry):
            check_integer(name, entry[name], 0, limits.MAX_MEMBERS)


def own_endpoint(environ: Mapping[str, str]) -> str:
    """Endpoint of the server on this host according to `environ`; the first of several.

    Raises:
        ConfigurationError: `environ` has no endpoint, or one with port *.
        ServerUnreachable: `environ` has no endpoint, and this user has no server.
    """
    if not environ.get("STATSD_BN_BIND", "").strip(" ,"):
        return _find_server(environ)
    endpoint = next(iter(bind_endpoints(environ)), "")
    scheme, _, address = endpoint.partition("://")
    if scheme == "ipc":
        return endpoint
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise ConfigurationError(f"ENDPOINT: expected one, since STATSD_BN_BIND has no fixed port: {endpoint!r}")
    return f"{scheme}://{_address_of(host)}:{port}"


def _address_of(host: str) -> str:
    """Address to connect to for a host, a wildcard or an interface name in an endpoint to listen on."""
    if host not in {name for _, name in socket.if_nameindex()}:
        return ALL_ADDRESSES.get(host, host)
    with zmq.Context() as context, context.socket(zmq.PAIR) as found:
        # ZeroMQ accepts an interface name for bind only.
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


def malformed_report(error: BaseException) -> ServerUnreachable:
    """Error of a malformed report."""
    what = error.message if isinstance(error, ProtocolError) else type(error).__name__
    return ServerUnreachable(f"expected a status report of this version, got a malformed one: {what}")


def describe(report: dict[str, Any]) -> str:
    """A report as text.

    Raises:
        ServerUnreachable: the report is malformed.
    """
    try:
        return _describe(report)
    except MALFORMED as error:
        raise malformed_report(error) from error


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
        lines.append(f"and {report['left_out']} more groups")
    elif not report["groups"]:
        lines.append("no jobs now" if ended else "no jobs")
    lines += ended
    return "\n".join(map(escape, lines))


def _describe_group(group: dict[str, Any]) -> list[str]:
    state = "open"
    if group["lost"]:
        state = f"broken: {_without_place(group['lost'], group)}"
    elif group["missing"] and group.get("members_left_out"):
        state = f"waiting for {group['missing']} ranks"
    elif group["missing"]:
        present = Members.of(member["member"] for member in group["members"])
        state = f"waiting for {format_missing_members(group['group'], group['world_size'], present, group['missing'])}"
    # A job that broke between two rounds has no failed round; "0 failed" next to its error would be misleading.
    failed = f", {group['rounds_failed']} failed" if group["rounds_failed"] else ""
    head = (
        f"job {group['job']!r}, group {group['group']!r}, epoch {group['epoch']}: "
        f"{len(group['members']) + group.get('members_left_out', 0)} of {group['world_size']} ranks, {state}; "
        f"{group['rounds_done']} rounds done{failed}"
    )
    lines = [head, *(f"  {text}" for text in group.get("non_finite", ()))]
    lines += [f"  {finding['kind']}: {finding['text']}" for finding in group.get("findings", ())]
    lines += [
        f"  rank {member['member']} ({member['place']}), step {member['step']}, {member['replicas']} "
        f"replica{'s' * (member['replicas'] != 1)}" + (f"; it {member['where']}" if member.get("where") else "")
        for member in group["members"]
    ]
    lines += _describe_transports(group)
    if left_out := group.get("members_left_out"):
        lines.append(f"  and {left_out} more ranks")
    lines += [
        f"  waiting {round_['seconds']:.1f} s for {_describe_missing(round_)}: {round_['round']}"
        for round_ in group["waiting"]
        if round_["seconds"] >= WAIT_SECONDS
    ]
    if left_out := group.get("waiting_left_out"):
        lines.append(f"  and {left_out} more rounds")
    return lines


def _describe_transports(group: dict[str, Any]) -> list[str]:
    """One line with the transports of the members; empty before their first heartbeats."""
    users: dict[str, list[int]] = {}
    for member in group["members"]:
        if transport := member.get("transport"):
            users.setdefault(transport, []).append(member["member"])
    if not users:
        return []
    transports = [
        transport if len(users) == 1 else f"{transport} of {format_ranks(Members.of(ranks))}"
        for transport, ranks in users.items()
    ]
    why = group.get("why_not_faster")
    return [f"  transport {', '.join(transports)}" + (f": {why}" if why else "")]


def _describe_ended(job: dict[str, Any]) -> str:
    how = f"broken: {_without_place(job['lost'], {'group': WORLD, **job})}" if job["lost"] else "in good order"
    return (
        f"job {job['job']!r}, epoch {job['epoch']}: ended {job['seconds']:.0f} s ago, {how}; "
        f"{job['world_size']} ranks, {job['rounds_done']} rounds done"
    )


def _without_place(text: str, of: dict[str, Any]) -> str:
    """A text without job and group, for a line that already names them."""
    return text.replace(f"in job {of['job']!r}, group {of['group']!r}, ", "in ")


def _describe_missing(round_: dict[str, Any]) -> str:
    left_out = round_.get("missing_left_out")
    return format_ranks(Members.of(round_["missing"])) + (f" and {left_out} more" if left_out else "")


REFRESH_SECONDS = 1.0

# Terminal control: cursor to the top left; clear the rest of the line; clear all below. Overwriting avoids flicker.
_HOME, _END_OF_LINE, _BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
_CLEAR = "\x1b[2J"


def as_json(report: dict[str, Any]) -> str:
    """A report as JSON on one line."""
    return json.dumps(report, ensure_ascii=False, sort_keys=True)


def watch(text: Callable[[], str], out: TextIO | None = None, pause: Callable[[float], None] = time.sleep) -> None:
    """Prints a text every second, until Ctrl-C.

    Args:
        text: returns the current text. If the server stops answering, the error is printed instead.
        out: destination; default: standard output.
        pause: sleeps for a number of seconds.

    Raises:
        ServerUnreachable: the first request failed.
    """
    out = out or sys.stdout
    is_terminal = out.isatty()
    try:
        shown = text()
        if is_terminal:
            out.write(_CLEAR)
        while True:
            out.write(_overwrite(shown) if is_terminal else f"{shown}\n")
            out.flush()
            pause(REFRESH_SECONDS)
            shown = _text_or_error(text)
    except KeyboardInterrupt:
        out.write("\n" if is_terminal else "")


def _overwrite(text: str) -> str:
    lines = "".join(f"{line}{_END_OF_LINE}\n" for line in text.split("\n"))
    return f"{_HOME}{lines}{_BELOW}"


def _text_or_error(text: Callable[[], str]) -> str:
    try:
        return text()
    except ServerUnreachable as error:
        return log_line(error)
