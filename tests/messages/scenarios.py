"""Complete errors as they reach a user: each scenario breaks one rule, and its error is printed in full."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import client
from client.launch.settings import resolve
from server.core.dispatcher import Dispatcher
from server.security.access import ANONYMOUS, OPERATOR, Principal
from server.security.quota import Quota
from statsd_bn.messages import Failure, Leave, Message
from statsd_bn.wire import decode, encode
from support.asked_job import LINE, Job, Process
from support.memory_members import MemoryMaster
from support.sentences import error_of
from support.strategies import contribution, key, register, rows, session_of

OPEN = register(0), register(1)
BOB = Principal("bob", "key of bob", ("b-*",))
WATCHER = Principal(OPERATOR, "key of the server", ("*",), read_only=True)


def finished_errors() -> Iterator[tuple[str, str]]:
    """Each scenario's name, and its error."""
    for name, scenario in {**SERVER, **CLIENT}.items():
        yield name, scenario()


def refused(*messages: Message, tenant: Principal = ANONYMOUS, **quota: Any) -> Callable[[], str]:
    """The error of the last message to a server."""

    def run() -> str:
        dispatcher = Dispatcher(b"server-0", 0.0, Quota(**quota))
        for message in messages:
            replies = dispatcher.receive(0.0, b"peer", encode(message), tenant).replies
        return text_of([decode(frame) for _, frame in replies])

    return run


def waiting(seconds: float, *places: tuple[int, str], **options: Any) -> Callable[[], str]:
    """The error of ranks that wait in layers for some seconds, in a job of three."""

    def run() -> str:
        job = Job(3, **options)
        job.processes[2] = Process(LINE)
        for rank, layer in places:
            job.contribute(rank, key(layer, step=7))
        return text_of(list(job.pass_time(seconds).values()))

    return run


def text_of(answers: list[Message]) -> str:
    failure = next(answer for answer in answers if isinstance(answer, Failure))
    return f"{failure.code}: {failure.message}"


def lost(cause: str) -> Callable[[], str]:
    """The error of the ranks that wait for a rank that leaves with a cause."""

    def run() -> str:
        job = Job(3)
        job.contribute(0)
        return text_of(job.send(Leave(session_of(2), cause), b"2"))

    return run


def silent() -> str:
    job = Job(3)
    job.contribute(0)
    job.size = 2  # the last rank sends no heartbeats any more
    return text_of(list(job.pass_time(6.0).values()))


def layer(**options: Any) -> nn.Module:
    made = client.SynchronizedBatchNorm2d(4, **options)
    made.layer_name = "stem.bn"
    return made


def raised(call: Callable[..., object], *arguments: object, **options: object) -> Callable[[], str]:
    return lambda: error_of(lambda: call(*arguments, **options))


def configured(environ: dict[str, str], **arguments: Any) -> Callable[[], str]:
    return raised(lambda: resolve(environ, **arguments).member())


SERVER = {
    "ranks in different layers": waiting(3.0, (0, "stem.bn"), (1, "stem.bn"), (2, "head.bn")),
    "a rank that does not arrive": waiting(12.0, (0, "stem.bn"), (1, "stem.bn"), deadline=10.0),
    "a rank that leaves": lost(""),
    "a rank that raises": lost("MemoryError: CUDA out of memory"),
    "a rank without heartbeats": silent,
    "other channels": refused(*OPEN, contribution(0, rows(1.0, channels=64)), contribution(1, rows(1.0, channels=32))),
    "another contribution": refused(*OPEN, contribution(0, 1.0), contribution(0, 2.0)),
    "an unknown session": refused(contribution(0)),
    "a rank twice": refused(*OPEN, register(1, session=b"another0", place="host-b, pid 812")),
    "another world size": refused(OPEN[0], register(1, 3)),
    "a rank beyond the size": refused(register(2, 2)),
    "another policy": refused(OPEN[0], register(1, min_members=1)),
    "a former run": refused(register(0, epoch=1), register(1, epoch=0)),
    "a session that left": refused(*OPEN, Leave(session_of(0), ""), register(0)),
    "a key for other jobs": refused(register(job="a-1"), tenant=BOB),
    "the server's own key": refused(register(), tenant=WATCHER),
    "too many groups": refused(register(job="one"), register(job="two"), max_groups=1),
    "too many ranks": refused(register(0, 3), max_members=2),
    "too much memory": refused(*OPEN, contribution(0, rows(1.0, channels=4096)), max_tenant_bytes=20_000),
}

CLIENT = {
    "an input of 1 dimension": lambda: error_of(layer(), torch.ones(4)),
    "an input of 3 dimensions": lambda: error_of(layer(), torch.ones(2, 4, 2)),
    "an input of integers": lambda: error_of(layer(), torch.ones(2, 4, 2, 2, dtype=torch.int32)),
    "an input of other channels": lambda: error_of(layer(), torch.ones(2, 3, 2, 2)),
    "a mask of floats": lambda: error_of(layer(), torch.ones(2, 4, 2, 2), torch.ones(2, 2, 2)),
    "a mask of another shape": lambda: error_of(layer(), torch.ones(2, 4, 2, 2), torch.ones(2, 2) > 0),
    "an unknown eps_mode": raised(client.SynchronizedBatchNorm2d, 4, eps_mode="max"),
    "an unknown group": raised(client.SynchronizedBatchNorm2d, 4, group="left"),
    "no micro-batches": raised(client.convert_model, nn.BatchNorm2d(4), chunks=0),
    "a loader of nothing": lambda: error_of(client.recalibrate, layer(), []),
    "a model to recalibrate without layers": lambda: error_of(client.recalibrate, nn.Linear(1, 1), [torch.ones(1, 1)]),
    "smart_ddp without a process group": lambda: error_of(client.smart_ddp, nn.Sequential(layer())),
    "ranks that do not connect": lambda: error_of(lambda: MemoryMaster().connect(0, 3, round_timeout=0.1)),
    "RANK=four": configured({"RANK": "four"}),
    "RANK=4 of 4": configured({"RANK": "4", "WORLD_SIZE": "4"}),
    "an unknown policy": configured({}, policy="loose"),
    "an unknown transport": configured({}, transport="pigeon"),
    "no time": configured({}, round_timeout=0.0),
    "min_members of a strict job": configured({}, min_members=2),
}
