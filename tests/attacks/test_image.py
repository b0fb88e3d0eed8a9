"""The attacks that ended the server or its members, on the images; where a container engine is asked for.

At 6b62bd3 the server's container ends with SIGABRT, a stranger is sent a member's token, and a replica's container ends
with SIGSEGV.
"""

import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from attacks.peers import Peers, job_of
from attacks.servers import Attacked
from attacks.test_nesting import DEPTHS, VICTIM, gather_with_victim, nested
from attacks.test_routing_ids import claim_the_next_ids
from attacks.test_stolen_session import begin, steal
from client import packing
from docs_engine import script, want_of_engine
from ports import free_port
from statsd_bn.messages import Status, StatusRequest

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(want_of_engine() is not None, reason=str(want_of_engine())),
]

engine = script("engine")

SERVER, REPLICA = "statsd-bn-server", "statsd-bn-replica"

START_SECONDS = 60.0


@pytest.fixture
def image() -> str:
    """The server's image; the test is skipped where the images have not been built."""
    for name in (SERVER, REPLICA):
        if not engine.docker("images", "--quiet", name).strip():
            pytest.skip(f"needs the image {name}, which docker/harness builds")
    return SERVER


@pytest.fixture
def server(image, tmp_path) -> Iterator[Attacked]:
    """A container of the server's image, open to this host alone."""
    port, name = free_port(), f"statsd-bn-attacked-{tmp_path.name[-20:]}"
    where = ["--network", "host", "--name", name, "--read-only", "--env", "STATSD_BN_CURVE="]
    log = tmp_path / "server.log"
    command = ["docker", "run", "--rm", *where, image]
    with (
        log.open("w") as output,
        subprocess.Popen([*command, "--bind", f"tcp://127.0.0.1:{port}"], stdout=output, stderr=output) as process,
    ):
        found = Attacked(f"tcp://127.0.0.1:{port}", process, log, None)
        try:
            expiry = time.monotonic() + START_SECONDS
            while "listening on" not in found.said():
                assert time.monotonic() < expiry, found.said()
                assert not found.ending, found.said()
                time.sleep(0.1)
            yield found
        finally:
            with suppress(engine.EngineError):  # it has ended
                engine.docker("kill", name)


def is_served(server: Attacked) -> bool:
    with Peers(server) as peers:
        return isinstance(peers.open().ask(StatusRequest()), Status)


@pytest.mark.parametrize("speaks", [True, False], ids=["speaking", "silent"])
def test_claims_of_the_next_ids_do_not_end_the_image(server, speaks):
    with Peers(server) as peers:
        claim_the_next_ids(server, peers, speaks=speaks)
    assert is_served(server), server.said()
    assert not server.ending


def test_the_image_tells_a_session_to_nobody_who_claims_its_connection(server):
    job = job_of("alice")
    with Peers(server) as members, Peers(server) as strangers:
        begin(members, strangers, job)
        assert not steal(members, strangers, job)
    assert is_served(server)


@pytest.mark.parametrize("depth", DEPTHS)
def test_what_nests_ends_no_replica_of_the_image(server, depth):
    job = job_of("alice")
    container = ["docker", "run", "--rm", "--network", "host", "--entrypoint", "python", REPLICA]
    command = [*container, "-c", VICTIM, server.endpoint, job, ""]
    code, said = gather_with_victim(server.endpoint, job, nested(depth, packing.TUPLE), command)
    assert code == 0, said
    assert said.startswith("ProtocolError")
