"""Fixtures own every process, socket and thread of the tests."""

import faulthandler
import gc
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

# Many processes compute on small tensors: with more threads than cores they would slow each other down.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # else inductor starts processes that import torch and remain

# Programs started by tests import from the folders next to this file.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))

# A run in the background of a shell script ignores Ctrl-C, and so would the programs that the tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import torch
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import HealthCheck, settings

import client
from client.session.protocol.member import AUTO, OVER_PROCESS_GROUP
from programs.ddp_programs import process_group_of
from server import Config, Service
from server.security.quota import Quota
from support.starter import MemberProcesses
from support.transports import CHOSEN, ON_DEVICE, PROCESS_GROUP, WATCHED, rows_on_devices

MEMBERS = 4
WAIT_SECONDS = 100.0

# Limit for the teardown of a test that has timed out, and for pytest's exit after the last test.
ENDING_SECONDS = 200.0

# On a busy machine or while a compiler holds the GIL, a process may stall for seconds, and must not count as lost.
# Tests of lost members have their own servers.
SILENCE_SECONDS = 60.0

# A busy machine generates examples slowly. Each run generates other ones.
settings.register_profile("tests", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

PROCESSES = {"launch", "pool", "python", "workers"}  # fixtures with processes that import torch
ALONE = {"honest_job_beside"}  # fixtures of tests that compare times

# scripts/test finds files with tests that run alone by these words.
ALONE_WORDS = re.compile(r"honest_job_beside|mark\.alone")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, object, object]:
    """Marks tests by their fixtures; a test that starts processes without a fixture has its mark in its source."""
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if fixtures & PROCESSES:
            item.add_marker(pytest.mark.processes)
        if fixtures & ALONE:
            item.add_marker(pytest.mark.alone)
        if item.get_closest_marker("alone") and not ALONE_WORDS.search(item.path.read_text()):
            raise pytest.UsageError(f"{item.nodeid} is alone: expected {ALONE_WORDS.pattern} in its file")
    result = yield  # pytest deselects tests by their marks
    if hasattr(config, "workerinput"):
        items[:] = _dealt(items, config.workerinput["workercount"])
    return result


def _dealt(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Puts slow files first in each xdist worker's share; other workers may take over its last tests."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    long = [tests for tests in files.values() if any(test.get_closest_marker("processes") for test in tests)]
    rest = [test for tests in files.values() if tests not in long for test in tests]
    dealt: list[pytest.Item] = []
    for worker in range(workers):
        dealt += itertools.chain.from_iterable(long[worker::workers])
        number = max(0, len(items) * (worker + 1) // workers - len(dealt))
        dealt += rest[:number]
        del rest[:number]
    return dealt + rest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Ends this process if the timeout's exception cannot end the test, as in a call into C or in a later fixture."""
    _watch(item)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    _watch(item)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Ends this process if a remaining thread keeps the interpreter from ending."""
    _end_process_in(ENDING_SECONDS, session.config)


def _watch(item: pytest.Item) -> None:
    mark, option = item.get_closest_marker("timeout"), item.config.getoption("timeout")
    seconds = float(mark.args[0] if mark else item.config.getini("timeout") if option is None else option)
    if seconds:  # 0 means no limit, for a debugger
        _end_process_in(seconds + ENDING_SECONDS, item.config)


def _end_process_in(seconds: float, config: pytest.Config) -> None:
    """Prints every thread's stack after so many seconds, and ends this process with exit code 1."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=_stderr_of(config))


@cache
def _stderr_of(config: pytest.Config) -> int:
    """A copy of the stderr that pytest does not capture; pytest closes its own copy at the end."""
    return os.dup(config.stash.get(fault_handler_stderr_fd_key, sys.__stderr__.fileno()))


def pytest_collection_finish() -> None:
    """Exempt loaded objects from garbage collection, which would otherwise take a tenth of the run's time."""
    gc.freeze()


@dataclass
class Server:
    endpoint: str
    process: subprocess.Popen[str]


@pytest.fixture(scope="session", autouse=True)
def _inductors_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each pytest process has its own cache, so that no process reads another's unfinished file."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("inductor"))


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with running_server("--silence-seconds", str(SILENCE_SECONDS)) as found:
        yield found


@pytest.fixture(scope="module")
def impatient_server() -> Iterator[Server]:
    """A server with the default of `--silence-seconds`."""
    with running_server() as found:
        yield found


@contextmanager
def running_server(*options: str, bind: str = "", setup: str = "") -> Iterator[Server]:
    """A server process that first runs `setup` and must exit with 0; without `bind` it listens on a Unix socket."""
    program = (
        ["-c", f"{setup}; from server.__main__ import main; raise SystemExit(main())"] if setup else ["-m", "server"]
    )
    with (
        tempfile.TemporaryDirectory(prefix="bn-") as folder,
        subprocess.Popen(
            [sys.executable, *program, "--bind", bind or f"ipc://{folder}/s", "--log-level", "error", *options],
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        try:
            line = process.stdout.readline()
            assert line.startswith("listening on "), line
            yield Server(line.split()[-1], process)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                code = process.wait(WAIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        assert code == 0


@pytest.fixture
def serve() -> Iterator[Callable[..., Service]]:
    """Starts services in threads, by default on TCP without keys; all end with the test."""
    with ExitStack() as stack:

        def run(bind: str = "tcp://127.0.0.1:*", curve: Path | None = None, **quota: float) -> Service:
            config = Config((bind,), insecure=True, curve=str(curve) if curve else None, quota=Quota(**quota))
            service = stack.enter_context(Service(config))
            thread = threading.Thread(target=service.run, daemon=True)
            thread.start()
            stack.callback(thread.join, WAIT_SECONDS)
            stack.callback(service.stop)
            return service

        yield run


_jobs = itertools.count()


@pytest.fixture
def job() -> str:
    return f"job-{next(_jobs)}"


@pytest.fixture(scope="session")
def member_processes() -> Iterator[MemberProcesses]:
    """Processes for the members, kept because importing torch takes seconds."""
    with MemberProcesses(MEMBERS) as processes:
        yield processes


@pytest.fixture
def pool(member_processes: MemberProcesses) -> ProcessPoolExecutor:
    return member_processes.for_one_test()


@pytest.fixture
def members(server: Server, pool: ProcessPoolExecutor, job: str) -> Callable[..., list[Any]]:
    """Runs `program(connection, *arguments)` in n processes of one job; returns their results by member."""

    def run(
        n: int,
        program: Callable[..., Any],
        *arguments: Any,
        job: str = job,
        policy: str = "strict",
        transport: str = "server",
        wait: float = WAIT_SECONDS,
        **others: Any,
    ) -> list[Any]:
        given = {"job": job, "world_size": n, "policy": policy, "transport": transport, **others}
        futures = [pool.submit(_member, program, server.endpoint, member, given, arguments) for member in range(n)]
        return [future.result(timeout=wait) for future in futures]

    return run


@dataclass(frozen=True)
class Rank:
    """A process of a torch process group, without a connection."""

    rank: int
    world_size: int

    @property
    def member(self) -> "Rank":
        """Programs read `process.member.rank`, whether they get a connection or a `Rank`."""
        return self


@pytest.fixture
def ranks(pool: ProcessPoolExecutor, tmp_path: Path) -> Callable[..., list[Any]]:
    """Runs `program(rank, *arguments)` in n processes of a process group; returns their results by rank."""
    stores = itertools.count()

    def run(n: int, program: Callable[..., Any], *arguments: Any, on_devices: bool = False) -> list[Any]:
        store = str(tmp_path / f"store-{next(stores)}")
        futures = [pool.submit(_rank, program, store, rank, n, arguments, on_devices) for rank in range(n)]
        return [future.result(timeout=WAIT_SECONDS) for future in futures]

    return run


@pytest.fixture
def over(
    members: Callable[..., list[Any]], ranks: Callable[..., list[Any]], server: Server, job: str
) -> Callable[..., list[Any]]:
    """Runs `program(process, *arguments)` in n processes over a transport of `TRANSPORTS`; options go to `connect`."""

    runs = itertools.count()

    def run(transport: str, n: int, program: Callable[..., Any], *arguments: Any, **given: Any) -> list[Any]:
        if transport == PROCESS_GROUP:
            return ranks(n, program, *arguments)
        if transport == ON_DEVICE:
            return ranks(n, program, *arguments, on_devices=True)
        if transport in {WATCHED, CHOSEN}:
            options = {"job": f"{job} over {transport} {next(runs)}", "world_size": n, **given}
            options["transport"] = AUTO if transport == CHOSEN else OVER_PROCESS_GROUP
            watched = partial(_watched, program, server.endpoint, options)
            return ranks(n, watched, *arguments, on_devices=transport == CHOSEN)
        return members(n, program, *arguments, job=f"{job} over {transport} {next(runs)}", transport=transport, **given)

    return run


def _member(program: Callable[..., Any], endpoint: str, member: int, given: dict[str, Any], arguments: Any) -> Any:
    with client.connect(endpoint, rank=member, **{"round_timeout": 30.0, **given}) as connection:
        return program(connection, *arguments)


def _watched(program: Callable[..., Any], endpoint: str, given: dict[str, Any], rank: Rank, *arguments: Any) -> Any:
    return _member(program, endpoint, rank.rank, given, arguments)


def _rank(program: Callable[..., Any], store: str, rank: int, n: int, arguments: Any, on_devices: bool) -> Any:
    with process_group_of(store, rank, n), rows_on_devices() if on_devices else nullcontext():
        return program(Rank(rank, n), *arguments)


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def compiling() -> Iterator[None]:
    """Resets the compiler: earlier compilations would make later ones dynamic."""
    yield
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def _disconnected() -> Iterator[None]:
    """Fails a test that leaves a connection, which the next test would use."""
    yield
    left = client.current_connection()
    client.disconnect()
    assert left is None, f"the test left {left} open"
