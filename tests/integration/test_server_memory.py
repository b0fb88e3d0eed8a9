"""The memory of a real server, for each way to fill it: its account, and a bounded rest."""

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from server.cli.status import ask
from statsd_bn.messages import NO_SERVER, Aggregate, Contribution, Message, Registered, StatusRequest
from statsd_bn.wire import decode, encode
from support.memory_members import wait_until
from support.paths import ROOT
from support.strategies import contribution, key, register, rows

WAIT_SECONDS = 60.0
MEGABYTE = 2**20

# The account of these servers; the rest is what the process takes at the beginning, and what is not counted.
ACCOUNT = 32 * MEGABYTE
REST = 64 * MEGABYTE


class Server:
    """A server process with a small account, and one honest pair beside whatever fills it."""

    def __init__(self, stack: ExitStack, account: int) -> None:
        limits = [
            "--max-server-bytes",
            str(account),
            "--max-tenant-bytes",
            str(account * 3 // 4),
            "--silence-seconds",
            "600",
        ]
        command = [
            sys.executable,
            "-m",
            "server",
            "--insecure",
            "--bind",
            "tcp://127.0.0.1:*",
            "--log-level",
            "error",
            *limits,
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self.process.stdout
        stack.callback(self.process.stdout.close)
        stack.callback(self.process.wait, WAIT_SECONDS)
        stack.callback(self.process.kill)
        self.endpoint = self.process.stdout.readline().split()[-1]
        self._stack = stack
        self._context = stack.enter_context(zmq.Context())
        self._answered = self.dial()
        self._step = 0
        self.train()
        self.before = self.resident_bytes()

    def dial(self, **options: int) -> "zmq.Socket[bytes]":
        dealer = self._stack.enter_context(self._context.socket(zmq.DEALER))
        dealer.linger = 0
        for name, value in options.items():
            setattr(dealer, name, value)
        dealer.connect(self.endpoint)
        return dealer

    def resident_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(status.split("VmRSS:")[1].split()[0])

    def train(self) -> None:
        """A round of the honest pair, which registers in the first; it asks again where it must, as a member does."""
        self._step += 1
        of_round = key(job="honest", step=self._step)
        is_first = self._step == 1
        said = [register(i, job="honest") if is_first else contribution(i, key=of_round) for i in (0, 1)]
        for _ in range(20):
            for message in said:
                self._answered.send(encode(message))
            while self._answered.poll(1500):
                answer = decode(self._answered.recv())
                # The server also tries whether it reaches a member, and may answer twice what was asked twice.
                is_open = isinstance(answer, Registered) and answer.digest != NO_SERVER and not answer.missing
                if is_open if is_first else isinstance(answer, Aggregate) and answer.key == of_round:
                    return
        pytest.fail("no answer")

    def check(self, most: int = REST) -> None:
        """The memory is within its bound, and the honest pair has its rounds."""
        grown = self.resident_bytes() - self.before
        assert grown < ACCOUNT + most, f"{grown / MEGABYTE:.0f} MB more than at the beginning"
        self.train()
        self.train()


@pytest.fixture
def server() -> Iterator[Server]:
    with ExitStack() as stack:
        yield Server(stack, ACCOUNT)


def say(dealer: "zmq.Socket[bytes]", *messages: Message) -> None:
    """Says one thing after the other; each has an answer, since a contribution says that it comes again."""
    for message in messages:
        again = dataclasses.replace(message, attempt=1) if isinstance(message, Contribution) else message
        dealer.send(encode(again))
        assert dealer.poll(WAIT_SECONDS * 1000), "no answer"
        while dealer.poll(0):
            dealer.recv()


def join(dealer: "zmq.Socket[bytes]", job: str, members: int) -> None:
    say(dealer, *(register(member, members, job=job) for member in range(members)))


def by_futures(server: Server) -> None:
    """Many small rounds of many members each, in many groups."""
    dealer = server.dial()
    for number in range(3):
        job = f"many{number}"
        join(dealer, job, 400)
        say(dealer, *(contribution(0, key=key(job=job, step=step)) for step in range(256)))
    assert ask(server.endpoint, WAIT_SECONDS)["over_limits"] > 0


def by_two_jobs(server: Server) -> None:
    """Rows, of two jobs that each keep what one may."""
    dealer = server.dial()
    for job in ("large1", "large2"):
        join(dealer, job, 2)
        say(dealer, *(contribution(0, rows(1.0, channels=50_000), key(job=job, step=step)) for step in range(100)))
    assert ask(server.endpoint, WAIT_SECONDS)["over_limits"] > 0


def by_registrations(server: Server) -> None:
    """Members of groups that never open."""
    dealer = server.dial()
    for number in range(200):
        job, session = f"crowd {number}", b"%04d" % number
        members = range(100)
        say(dealer, *(register(i, 101, job=job, session=session + b"%04d" % i, place="h" * 250) for i in members))
    assert ask(server.endpoint, WAIT_SECONDS)["over_limits"] > 0


def by_unread_answers(server: Server) -> None:
    """Small questions with large answers, over connections that do not read."""
    dealer = server.dial()
    say(dealer, register(0, 1, job="alone"))
    wide = contribution(0, rows(1.0, channels=60_000), key(job="alone"))
    say(dealer, wide)
    say(dealer, *(register(i, 600, job="crowd", session=b"%08d" % i, place="h" * 250) for i in range(500)))
    for _ in range(24):
        stuck = server.dial(rcvhwm=1, rcvbuf=4096)
        for _ in range(8):
            stuck.send(encode(wide))
        for _ in range(160):
            stuck.send(encode(StatusRequest()))
    # How many are dropped depends on how far the server came before the limits of a connection stopped it.
    wait_until(lambda: ask(server.endpoint, WAIT_SECONDS)["dropped_answers"] > 0, WAIT_SECONDS)


def by_asking_again(server: Server) -> None:
    """The same large contribution to a broken group, again and again: each is refused with the kept reason."""
    dealer = server.dial()
    join(dealer, "again", 2)
    say(dealer, register(0, 2, job="again", epoch=1, session=b"newcomer"))
    wide = contribution(1, rows(1.0, channels=60_000), key(job="again"))
    say(dealer, *[wide] * 200)


def by_work_that_waits(server: Server) -> None:
    """More large messages than there is time for, over many connections, beside the honest pair."""
    dealers = [server.dial(sndhwm=8) for _ in range(16)]
    join(dealers[0], "flood", 2)
    frame = encode(contribution(0, rows(*[1.0] * 8, channels=60_000), key(job="flood")))
    for _ in range(8):
        for dealer in dealers:
            try:
                dealer.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                continue
        server.train()


@pytest.mark.parametrize(
    "fill",
    [
        by_futures,
        by_two_jobs,
        pytest.param(by_registrations, marks=pytest.mark.long),
        by_unread_answers,
        by_asking_again,
        # How much ZeroMQ holds at a moment depends on who else has the processor.
        pytest.param(by_work_that_waits, marks=pytest.mark.alone),
    ],
    ids=lambda fill: fill.__name__,
)
def test_the_memory_stays_within_the_account_and_a_bounded_rest(server: Server, fill: Callable[[Server], None]):
    fill(server)
    server.check()
