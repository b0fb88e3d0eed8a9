"""Duration of a round with many members on one server.

One process simulates the members, each a real session over a separate ZeroMQ socket, as with one process per member.
It encodes the frames of a round before the clock starts. Then all members contribute, one after the other, and receive
their answers. The server's processor time and memory are the operating system's figures.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from client.session.protocol.member import Member
from client.session.protocol.session import Session
from statsd_bn import limits
from statsd_bn.messages import Aggregate
from statsd_bn.reduction import Rows
from statsd_bn.wire import decode

WAIT_MILLISECONDS = 60_000
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measures each number of members and prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, nargs="+", default=[2, 16, 128, 1024])
    parser.add_argument("--channels", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [measure(members, options.channels, options.rounds) for members in options.members]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    heads = (("members", 8), ("opens, s", 9), ("round, ms", 10), ("p99, ms", 8), ("µs/member", 10))
    print(*(f"{head:>{width}}" for head, width in (*heads, ("server µs/member", 17), ("MiB", 7))))
    for row in rows:
        print(
            f"{row['members']:>8} {row['opening']:>9.2f} {row['round'] * 1e3:>10.2f} "
            f"{row['p99'] * 1e3:>8.2f} "
            f"{row['per_member'] * 1e6:>10.1f} {row['server_per_member'] * 1e6:>17.1f} {row['memory'] / 1024:>7.1f}"
        )


def measure(members: int, channels: int, rounds: int) -> dict[str, Any]:
    """Returns the times of one number of members, in seconds, and the server's memory in KiB."""
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{Path(folder) / 'server'}"
        command = [sys.executable, "-m", "server", "--bind", endpoint, "--log-level", "error"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:  # noqa: S603 - our own server
            try:
                server.stdout.readline()
                return {
                    "members": members,
                    "channels": channels,
                    **_run(server.pid, endpoint, members, channels, rounds),
                }
            finally:
                server.send_signal(signal.SIGTERM)


def _run(pid: int, endpoint: str, members: int, channels: int, rounds: int) -> dict[str, float]:
    with zmq.Context() as context:
        context.set(zmq.MAX_SOCKETS, 4 * members + 64)
        started = time.perf_counter()
        connections = _connect(context, endpoint, members)
        opening = time.perf_counter() - started
        rng = np.random.default_rng(0)
        contributions = [Rows((32,), rng.standard_normal((1, 2, channels))) for _ in range(members)]
        for _ in range(3):
            _round(connections, contributions)
        busy = _processor_seconds(pid)
        times = [_round(connections, contributions) for _ in range(rounds)]
        busy = _processor_seconds(pid) - busy
        memory = _resident(pid)
        for socket, session in connections:
            socket.send(session.leave(""))
            socket.close(linger=1000)
    median = statistics.median(times)
    return {
        "opening": opening,
        "round": median,
        "p99": sorted(times)[int(len(times) * 0.99)],
        "per_member": median / members,
        "server_per_member": busy / rounds / members,
        "memory": memory,
    }


def _connect(context: zmq.Context, endpoint: str, members: int) -> list[tuple[zmq.Socket, Session]]:
    connections = []
    for number in range(members):
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVTIMEO, WAIT_MILLISECONDS)
        socket.connect(endpoint)
        who = Member("job", "world", 0, number, members, 600.0, f"place {number}")
        session = Session(number.to_bytes(limits.TOKEN_BYTES, "big"), who)
        socket.send(session.register())
        connections.append((socket, session))
    for socket, session in connections:
        while (answer := session.registered(socket.recv())) is None or answer.missing:
            pass
    return connections


def _round(connections: list[tuple[zmq.Socket, Session]], contributions: list[Rows]) -> float:
    """Returns the seconds from the first contribution's sending to the last answer's arrival."""
    sessions = [session for _, session in connections]
    frames = [one.contribution(one.forward_key("bn"), rows) for one, rows in zip(sessions, contributions, strict=True)]
    started = time.perf_counter()
    for (socket, _), frame in zip(connections, frames, strict=True):
        socket.send(frame)
    answers = {socket.recv() for socket, _ in connections}
    seconds = time.perf_counter() - started
    (answer,) = answers
    if not isinstance(decode(answer), Aggregate):
        raise SystemExit(f"expected an aggregate, got {decode(answer)}")
    return seconds


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def _resident(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:")))


if __name__ == "__main__":
    main()
