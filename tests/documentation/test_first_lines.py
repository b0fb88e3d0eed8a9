"""Every error of ours has a short first line when Python or a command prints it, as docs/errors.md promises."""

import ast
import traceback
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import nn

import client
from client.session.connection import Connection
from server.__main__ import main
from statsd_bn.errors import BY_CODE
from statsd_bn.text import FIRST_LINE, unwrap
from support.memory_members import outcome, run_members
from support.paths import ROOT

WIDTH = 120
OPEN = "tcp://0.0.0.0:5555"
NOBODY = "ipc:///tmp/a folder for sockets of statsd_bn that nobody has ever made/and/no/server/listens/there"


def first_line(error: BaseException) -> str:
    return traceback.format_exception_only(error)[0].splitlines()[0]


# Actions of a user, with environment variables.
DONE: list[tuple[Callable[[], object], dict[str, str]]] = [
    (client.connect, {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node-7", "MASTER_PORT": "29500"}),
    (client.connect, {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "4", "RANK": "0"}),
    (client.connect, {"RANK": "4", "WORLD_SIZE": "4"}),
    (client.connect, {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node-7", "STATSD_BN_SECRET": "short" * 30}),
    (client.connect, {"STATSD_BN_LOG_LEVEL": "as loud as you can, please"}),
    (lambda: client.connect(NOBODY, rank=0, world_size=2), {}),
    (lambda: client.connect("not an endpoint, and quoted in full by the error", rank=0, world_size=2), {}),
    (lambda: client.connect(OPEN, rank=0, world_size=2, curve=f"{NOBODY}/client.key_secret"), {}),
    (lambda: client.connect(OPEN, rank=0, world_size=2, transport="the fastest one that there is on this machine"), {}),
    (lambda: client.connect(OPEN, rank=0, world_size=2, policy="elastic", min_members=3), {}),
    (lambda: client.Group("local", 2), {}),
    (lambda: client.convert_model(nn.BatchNorm1d(2), group="pair"), {}),
    (lambda: client.convert_model(nn.SyncBatchNorm(2, process_group="the first half of all ranks")), {}),
    (lambda: client.SynchronizedBatchNorm1d(2, process_group="the first half of all ranks"), {}),
    (lambda: client.SynchronizedBatchNorm1d(2)(torch.zeros(2, 3)), {}),
    (lambda: client.SynchronizedBatchNorm1d(2)(torch.zeros(4, 2), mask=torch.ones(3)), {}),
    (lambda: client.SynchronizedBatchNorm2d(2)(torch.zeros(1, 2, 1, 1)), {}),
    (lambda: client.recalibrate(nn.Linear(2, 2), []), {}),
    (lambda: client.smart_DDP(nn.Linear(2, 2)), {}),
]


@pytest.mark.parametrize("number", range(len(DONE)))
def test_errors_of_users_have_a_short_first_line(number, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "STATSD_BN_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    do, environ = DONE[number]
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    error = outcome(do)
    assert isinstance(error, (*BY_CODE.values(), ValueError, RuntimeError, TypeError)), error
    assert len(first_line(error)) <= WIDTH


def test_errors_of_invalid_values_have_a_short_first_line():
    def sync(connection: Connection) -> object:
        handler = client.DDPHandler(None, connection=connection)
        return outcome(lambda: handler.mp_sync_dict({f"the loss of rank {connection.rank} in this step": 1.0}))

    for error in run_members(2, sync):
        assert len(first_line(error)) <= WIDTH
        assert "of rank 1 in this step' only from 1" in unwrap(str(error))


COMMANDS = [
    ["--bind", OPEN],
    ["--bind", "not an endpoint, and quoted in full by the error, and so long that the error needs two lines for it"],
    ["--bind", "ipc:///tmp/" + "a_folder/" * 20 + "socket"],
    ["status", "udp://127.0.0.1:1"],
    ["status", OPEN, "--curve", f"{NOBODY}/client.key_secret"],
    ["keygen", "/dev/null/a folder that cannot be made, because the path above it is a device and no folder/keys"],
    ["statsu"],
    ["status", "--wacth"],
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=range(len(COMMANDS)))
def test_errors_of_commands_have_a_short_first_line(arguments, capsys):
    with suppress(SystemExit):  # of the arguments' parser
        assert main(arguments) in {2, 3, 4}
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert len(lines[0]) <= WIDTH


@pytest.mark.parametrize("error", BY_CODE.values(), ids=BY_CODE)
def test_every_error_of_ours_breaks_a_long_sentence(error):
    sentence = "a thing: expected one of these, got another of those; " * 9
    instance = error(sentence)
    assert len(first_line(instance)) <= WIDTH
    assert " ".join(str(instance).split()) == sentence.strip()
    assert instance.message == sentence


@pytest.mark.parametrize("folder", ["client", "server", "statsd_bn"])
def test_errors_of_builtin_classes_are_broken_where_they_are_raised(folder):
    """Only our own classes break a long text into lines."""
    plain = {kind.__name__ for kind in (IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)}
    long = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in plain and node.args:
                long += [f"{path.relative_to(ROOT)}:{node.lineno}"] if _letters(node.args[0]) > FIRST_LINE else []
    assert long == []


def _letters(text: ast.expr) -> int:
    """The length of a text in the code; a value in braces counts as 8."""
    if isinstance(text, ast.Constant):
        return len(str(text.value))
    return sum(_letters(part) for part in text.values) if isinstance(text, ast.JoinedStr) else 8
