"""Fixtures of the attacks: servers with keys, and the honest job's processes."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from attacks import honest, servers
from attacks.honest import Beside, Workers
from attacks.servers import Attacked


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Attacked]]:
    with ExitStack() as stack:

        def run(*options: str, **given: object) -> Attacked:
            folder = Path(tmp_path, f"server-{len(list(tmp_path.iterdir()))}")
            folder.mkdir()
            return stack.enter_context(servers.attacked(folder, *options, with_keys=True, **given))

        yield run


@pytest.fixture
def server(start) -> Attacked:
    return start()


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    found = Workers()
    yield found
    found.close()


@pytest.fixture
def honest_job_beside(workers) -> Callable[..., AbstractContextManager[Beside]]:
    return lambda server, **given: honest.honest_job_beside(workers, server, **given)
