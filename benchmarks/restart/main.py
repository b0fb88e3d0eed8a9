"""How long after a restart of the server does the first round complete?

Two members exchange without a pause while the server is killed and started again, several times. Measured is the time
from the new server's `listening on` to the end of the first round after it, at the member that is later.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import numpy as np

import client
from statsd_bn import Rows

MEMBERS = 2
UP_SECONDS = 0.5


def member(endpoint: str, number: int, ends: Pipe) -> None:
    """Exchanges until the parent closes its end, and sends when each round ended."""
    pipe = client.SlavePipe(client.connect(endpoint, rank=number, world_size=MEMBERS, round_timeout=60.0), "bn")
    rows = Rows((1,), np.ones((1, 2, 256)))
    while True:
        pipe.run_slave(rows)
        try:
            ends.send(time.monotonic())
        except BrokenPipeError:
            os._exit(0)


@contextmanager
def server(endpoint: str) -> Iterator[float]:
    """Runs a server, gives the time it began to listen, and kills it."""
    arguments = [sys.executable, "-m", "server", "--bind", endpoint, "--log-level", "error"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as process:  # noqa: S603 - this project's own server
        if process.stdout is None or not process.stdout.readline():
            raise SystemExit("the server did not start")
        yield time.monotonic()
        process.kill()


def main() -> None:
    """Measures and prints median and worst, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{Path(folder) / 'server'}"
        pipes = [context.Pipe(duplex=False) for _ in range(MEMBERS)]
        members = [
            context.Process(target=member, args=(endpoint, number, sender), daemon=True)
            for number, (_, sender) in enumerate(pipes)
        ]
        with server(endpoint):
            for process in members:
                process.start()
            for receiver, _ in pipes:
                receiver.recv()
            time.sleep(UP_SECONDS)
        found = [_seconds(endpoint, [receiver for receiver, _ in pipes]) for _ in range(options.kills)]
        for process in members:
            process.kill()
    if options.json:
        print(json.dumps(found))
        return
    print(f"first round after a restart: median {statistics.median(found):.2f} s, worst {max(found):.2f} s, of {found}")


def _seconds(endpoint: str, receivers: list[Pipe]) -> float:
    with server(endpoint) as listening:
        firsts = []
        for receiver in receivers:
            while (ended := receiver.recv()) < listening:
                pass
            firsts.append(ended)
        time.sleep(UP_SECONDS)
    return round(max(firsts) - listening, 3)


if __name__ == "__main__":
    main()
