"""The server that the contract tests connect to, and two ways to synchronise: over it, or a process group alone."""

from collections.abc import Iterator

import pytest

from programs.contract_training_programs import Job
from support.contract_seed import server_on_a_socket


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with server_on_a_socket() as running:
        yield running.endpoint


@pytest.fixture
def connected(endpoint, job) -> Job:
    return Job(endpoint, job)


@pytest.fixture(params=["connected", "process group"])
def either(request, connected) -> Job | None:
    """A job to connect to, or None for torch's process group without a connection."""
    return connected if request.param == "connected" else None
