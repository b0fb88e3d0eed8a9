"""Fixtures of the attacks: servers with and without keys, and the honest job's processes."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from attacks import honest, servers
from attacks.honest import Beside, Workers
from attacks.servers import Attacked
from attacks.variants import needs_curve


@pytest.fixture(params=[False, pytest.param(True, marks=needs_curve)])
def with_keys(request) -> bool:
    """Whether the server asks for keys; a test that takes this runs both ways."""
    return request.param


@pytest.fixture
def start(tmp_path, with_keys) -> Iterator[Callable[..., Attacked]]:
    """Starts servers with further options; all end with the test."""
    with ExitStack() as stack:

        def run(*options: str, with_keys: bool = with_keys, **given: object) -> Attacked:
            folder = Path(tmp_path, f"server-{len(list(tmp_path.iterdir()))}")
            folder.mkdir()
            return stack.enter_context(servers.attacked(folder, *options, with_keys=with_keys, **given))

        yield run


@pytest.fixture
def server(start) -> Attacked:
    """A server with the default options."""
    return start()


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    found = Workers()
    yield found
    found.close()


@pytest.fixture
def honest_job_beside(workers) -> Callable[..., AbstractContextManager[Beside]]:
    """`honest.honest_job_beside` with the session's processes."""
    return lambda server, **given: honest.honest_job_beside(workers, server, **given)
