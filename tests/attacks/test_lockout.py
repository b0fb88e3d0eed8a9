"""One tenant cannot take all room for jobs."""

import inspect

from attacks.crowds import ask_all
from attacks.peers import Peers, job_of
from attacks.servers import attacked
from server.security.keygen import generate
from statsd_bn.messages import Failure, Register, Registered


def registrations(tenant: str, first: int, number: int, member: int = 0) -> list[Register]:
    return [
        Register(b"%08d" % (first + one), job_of(tenant), "world", 0, member, 2, 0, 600.0, "greedy")
        for one in range(number)
    ]


def test_the_keys_of_one_tenant_do_not_lock_out_another(tmp_path):
    keys = ["bob", "bob2", "bob3", "bob4", "bob5"]
    generate(tmp_path / "keys", ["alice"], ["alice-*"])
    tenant = {"tenant": "bob"} if "tenant" in inspect.signature(generate).parameters else {}
    generate(tmp_path / "keys", keys, ["bob-*"], **tenant)
    with attacked(tmp_path, "--silence-seconds", "3600", with_keys=True) as server:
        for number, name in enumerate(keys):
            with Peers(server, name) as peers:
                ask_all(peers.open(), registrations("bob", 1024 * number, 256))
        with Peers(server, "alice") as peers:
            answer = peers.open().ask(registrations("alice", 2**20, 1)[0])
            assert isinstance(answer, Registered), isinstance(answer, Failure) and answer.message
