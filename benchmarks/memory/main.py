"""Memory: what a server keeps after a million rounds.

Eight members, simulated in one process by real sessions over sockets of their own, go through round after round with a
real server. Some contributions are sent twice, some are repeated when their round is over, some when it is long
forgotten. The server's resident memory is read as it goes.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

import numpy as np
import zmq

from client.conversation.member import Member
from client.conversation.session import Session
from statsd_bn import limits
from statsd_bn.errors import RoundFailed
from statsd_bn.messages import Aggregate
from statsd_bn.round_key import RoundKey
from statsd_bn.rows import Rows

MEMBERS = 8
WAIT_MILLISECONDS = 20_000

# One contribution in so many is sent twice at once, repeated after its round, and repeated after all is forgotten.
TWICE, LATE, ANCIENT = 10, 50, 200
FORGOTTEN = 40


def main() -> None:
    """Runs the rounds and prints the memory on the way, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1_000_000)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--points", type=int, default=20, help="how often the memory is read")
    parser.add_argument("--settled", type=int, default=10_000, help="rounds after which it must be flat")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.rounds, options.channels, options.points, options.settled)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for rounds, kilobytes in found["memory"]:
        print(f"{rounds:>9} rounds  {kilobytes / 1024:8.2f} MiB")
    print(f"{found['repeated']} contributions repeated, {found['seconds']:.0f} s")
    print(f"after the first {options.settled}: {found['growth'] / 1024:+.2f} MiB")


def measure(rounds: int, channels: int, points: int, settled: int) -> dict[str, object]:
    """Returns the server's resident memory in KiB at some points of the run, and its growth once it has settled."""
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{Path(folder) / 'server'}"
        command = [sys.executable, "-m", "server", "--bind", endpoint, "--log-level", "error"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:  # noqa: S603 - our own
            try:
                server.stdout.readline()
                run = _Run(endpoint, channels)
                marks = {settled, *(rounds * point // points for point in range(1, points + 1))}
                memory, started = [], time.monotonic()
                for done in range(1, rounds + 1):
                    run.round()
                    if done in marks:
                        memory.append((done, resident(server.pid)))
                run.close()
            finally:
                server.send_signal(signal.SIGTERM)
    base = dict(memory)[settled]
    growth = max(kilobytes for done, kilobytes in memory if done >= settled) - base
    return {"memory": memory, "growth": growth, "repeated": run.repeated, "seconds": time.monotonic() - started}


def resident(pid: int) -> int:
    """Returns a process's resident memory in KiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:")))


class _Run:
    """Eight members that take part in one round after the other."""

    def __init__(self, endpoint: str, channels: int) -> None:
        self._chance = random.Random(0)  # noqa: S311 - the same mix each time
        self._context = zmq.Context()
        self._rows = [Rows((1,), np.full((1, 2, channels), float(number))) for number in range(MEMBERS)]
        self._past: deque[tuple[int, RoundKey]] = deque(maxlen=FORGOTTEN)
        self.repeated = 0
        self._members = []
        for number in range(MEMBERS):
            socket = self._context.socket(zmq.DEALER)
            socket.connect(endpoint)
            socket.setsockopt(zmq.RCVTIMEO, WAIT_MILLISECONDS)
            who = Member("job", "world", 0, number, MEMBERS, 60.0, f"place {number}")
            session = Session(number.to_bytes(limits.TOKEN_BYTES, "big"), who)
            self._members.append((socket, session))
            socket.send(session.register())
        for socket, session in self._members:
            while (answer := session.registered(socket.recv())) is None or answer.missing:
                pass

    def round(self) -> None:
        """One round, which every member sees through."""
        keys = []
        for number, (socket, session) in enumerate(self._members):
            keys.append(key := session.forward_key("bn"))
            socket.send(session.contribution(key, self._rows[number]))
            if self._chance.randrange(TWICE) == 0:
                self._repeat(number, key)
        for (socket, session), key in zip(self._members, keys, strict=True):
            while not isinstance(_answer(session, key, socket.recv()), Aggregate):
                pass
        self._past.append((self._chance.randrange(MEMBERS), keys[0]))
        if self._chance.randrange(LATE) == 0:
            self._repeat(*self._past[-1])
        if self._chance.randrange(ANCIENT) == 0:
            self._repeat(*self._past[0])

    def _repeat(self, number: int, key: RoundKey) -> None:
        socket, session = self._members[number]
        socket.send(session.contribution(key, self._rows[number], attempt=1))
        self.repeated += 1

    def close(self) -> None:
        """Says goodbye for all."""
        for socket, session in self._members:
            socket.send(session.leave(""))
        self._context.destroy(linger=1000)


def _answer(session: Session, key: RoundKey, frame: bytes) -> object:
    try:
        return session.answer(key, frame)
    except RoundFailed as error:
        raise SystemExit(f"a round failed: {error}") from error


if __name__ == "__main__":
    main()
