"""Processor time and memory of the server and the view while a page is open.

One process plays the ranks of a job whose rounds are in shared memory. Each rank has a connection and sends a heartbeat
and its round trips once a second; the first rank also sends the figures of the next 64 layers, as many as a sample
holds. The reader follows `/events` and requests `/heat` and a layer's `/history` once a second, as the page does.
Processor time is of the last `--seconds`; memory is the most that was resident at any time.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import zmq

from client.session.protocol.member import SHARED_MEMORY, Member
from client.session.protocol.session import Session
from statsd_bn import limits, messages
from statsd_bn.skew import compute_figures
from statsd_bn.wire import encode

CHANNELS = 64
STEPS_PER_SECOND = 5
WARM_UP_SECONDS = 15.0
WAIT_MILLISECONDS = 60_000
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measures each size and prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1000])
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [measure(ranks, options.layers, options.seconds) for ranks in options.ranks]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'ranks':>6} {'layers':>7} {'server, %':>10} {'MiB':>7} {'view, %':>8} {'MiB':>7}")
    for row in rows:
        server, view = row["server"], row["view"]
        print(
            f"{row['ranks']:>6} {row['compared_layers']:>7} {server['share']:>10.1%} {server['memory'] / 1024:>7.1f} "
            f"{view['share']:>8.1%} {view['memory'] / 1024:>7.1f}"
        )


def measure(ranks: int, layers: int, seconds: float) -> dict[str, Any]:
    """Returns shares of a processor, and memory in KiB, of the server and the view."""
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{Path(folder) / 'server'}"
        server = [sys.executable, "-m", "server", "--bind", endpoint, "--log-level", "error"]
        view = [sys.executable, "-m", "server", "view", endpoint, "--http", "127.0.0.1:0"]
        with (
            subprocess.Popen(server, stdout=subprocess.PIPE, text=True) as serving,  # noqa: S603 - our own
            zmq.Context() as context,
        ):
            try:
                serving.stdout.readline()
                context.set(zmq.MAX_SOCKETS, 4 * ranks + 64)
                job = Job(context, endpoint, ranks, layers)
                with subprocess.Popen(view, stderr=subprocess.PIPE, text=True) as viewing:  # noqa: S603 - our own
                    try:
                        link = re.search(r"http://\S+", viewing.stderr.readline())[0]
                        return {"ranks": ranks, "layers": layers, **_watch(job, link, serving, viewing, seconds)}
                    finally:
                        viewing.send_signal(signal.SIGTERM)
            finally:
                job.close()
                serving.send_signal(signal.SIGTERM)


def _watch(
    job: "Job", link: str, serving: subprocess.Popen[str], viewing: subprocess.Popen[str], seconds: float
) -> dict[str, Any]:
    reader = Reader(link, job.layers)
    processes = {"server": serving.pid, "view": viewing.pid}
    job.run(WARM_UP_SECONDS)
    before = {name: _processor_seconds(pid) for name, pid in processes.items()}
    requested, started = reader.requested, time.monotonic()
    job.run(seconds)
    took = time.monotonic() - started
    found = {
        name: {"share": (_processor_seconds(pid) - before[name]) / took, "memory": _most_resident(pid)}
        for name, pid in processes.items()
    }
    if reader.requested - requested < seconds / 2:
        raise SystemExit(f"expected a snapshot a second, got {reader.requested - requested} in {took:.0f} s")
    return {**found, "compared_layers": reader.drawn}


class Job:
    """The simulated ranks of a job."""

    def __init__(self, context: zmq.Context, endpoint: str, ranks: int, layers: int) -> None:
        self.layers = [f"layer{number // 10}.{number % 10}.bn1" for number in range(layers)]
        self._members: list[tuple[zmq.Socket, Session]] = []
        self._steps = 0
        self._microseconds = 0
        rng, counts = np.random.default_rng(0), np.full(ranks, 32.0)
        self._figures = [compute_figures(counts, _rows(rng, ranks)) for _ in self.layers]
        for rank in range(ranks):
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.RCVTIMEO, WAIT_MILLISECONDS)
            socket.connect(endpoint)
            who = Member("job", "world", 0, rank, ranks, 600.0, f"host-{rank // 8}, pid {1000 + rank}")
            session = Session(rank.to_bytes(limits.TOKEN_BYTES, "big"), who)
            socket.send(session.register())
            self._members.append((socket, session))
        for socket, session in self._members:
            while (answer := session.registered(socket.recv())) is None or answer.missing:
                pass

    def run(self, seconds: float) -> None:
        """Sends the ranks' messages once a second for so many seconds."""
        began = time.monotonic()
        for second in range(round(seconds)):
            time.sleep(max(0.0, began + second - time.monotonic()))
            self._send()

    def _send(self) -> None:
        self._steps += STEPS_PER_SECOND
        rounds = 2 * self._steps * len(self.layers)
        self._microseconds += 2 * STEPS_PER_SECOND * len(self.layers) * 50
        counts = [0] * limits.BUCKETS
        counts[limits.BUCKETS // 2] = rounds
        for socket, session in self._members:
            token = session.member_token
            heartbeat = messages.Heartbeat(token, self._steps, rounds, SHARED_MEMORY, "", self._microseconds)
            socket.send(encode(heartbeat))
            socket.send(encode(messages.RoundTrips(token, self._microseconds, tuple(counts))))
            while socket.poll(0):
                socket.recv()
        socket, session = self._members[0]
        turns = -(-len(self.layers) // limits.MAX_SKEW_LAYERS)
        first = self._steps // STEPS_PER_SECOND % turns * limits.MAX_SKEW_LAYERS
        some = slice(first, first + limits.MAX_SKEW_LAYERS)
        # The view keeps only samples that differ from the one before.
        names, figures = "\n".join(self.layers[some]), np.stack(self._figures[some]) * (1 + 1e-3 * (self._steps % 7))
        socket.send(encode(messages.SkewStats(session.member_token, self._steps, names, figures)))

    def close(self) -> None:
        """Ends the ranks' connections."""
        for socket, session in self._members:
            socket.send(session.leave(""))
            socket.close(linger=1000)


def _rows(rng: np.random.Generator, ranks: int) -> Any:
    """Sum and sum of squares of 32 values for each rank and channel."""
    values = rng.standard_normal((ranks, 32, CHANNELS))
    return np.stack((values.sum(1), (values**2).sum(1)), 1)


class Reader:
    """The page's requests."""

    def __init__(self, link: str, layers: list[str]) -> None:
        self._base, _, self._token = link.partition("/?token=")
        self._layers = layers
        self.requested = 0  # how often /heat and /history were requested
        self.drawn = 0  # layers in the latest heat map
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        with suppress(OSError):  # when the view ends; `_watch` counts the requests before
            for line in self._open("/events"):
                if line.startswith(b"data:"):
                    self._draw()

    def _draw(self) -> None:
        names = {"job": "job", "group": "world"}
        heat = self._open(f"/heat?{urlencode(names)}").read()
        if not heat:
            return
        self.drawn = len(json.loads(heat)["layers"])
        self._open(f"/history?{urlencode({**names, 'layer': self._layers[self.requested % self.drawn]})}").read()
        self.requested += 1

    def _open(self, path: str) -> Any:
        request = urllib.request.Request(  # noqa: S310 - http on this machine
            self._base + path, headers={"Authorization": f"Bearer {self._token}"}
        )
        return urllib.request.urlopen(request)  # noqa: S310 - as above


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def _most_resident(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")))


if __name__ == "__main__":
    main()
