"""No secret key is readable on the network, such as in torch's TCPStore, which has no authentication."""

import socket
import subprocess
import sys
import time

import pytest
from torch import distributed

from attacks.servers import ROOT, end, environment
from support.launched import free_port

RANK_0 = """
import client
client.connect(round_timeout=20.0, join_timeout=15.0)
"""

# Far longer than rank 0 waits for rank 1.
SECONDS = 80.0

# Words before a secret key in key files.
WORDS = (b"secret-key", b"secret_key")


def own_address() -> str:
    """An address of this host by which others reach it; the test is skipped where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        try:
            trial.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this host has no address but loopback")
        return trial.getsockname()[0]


def is_open(address: str, port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex((address, port)) == 0


def test_the_store_has_no_secret_key():
    address, port = own_address(), free_port()
    nodes = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": address}
    launched = {**nodes, "MASTER_PORT": str(port), "GROUP_WORLD_SIZE": "2", "GROUP_RANK": "0", "STATSD_BN_JOB": "run"}
    command = [sys.executable, "-c", RANK_0]
    keys = [f"statsd_bn/job run/{life}/0" for life in ("latest life", "life 0")]
    env = environment(**launched)
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as rank_0:
        try:
            expiry = time.monotonic() + SECONDS
            entries = []
            while not is_open(address, port) and rank_0.poll() is None and time.monotonic() < expiry:
                time.sleep(0.05)
            assert is_open(address, port) or rank_0.poll() is not None, "rank 0 has opened no store"
            store = distributed.TCPStore(address, port, 2, is_master=False) if rank_0.poll() is None else None
            while not entries and rank_0.poll() is None and time.monotonic() < expiry:
                entries = [store.get(key) for key in keys if store.check([key])]
                time.sleep(0.05)
        finally:
            end(rank_0)
            output = rank_0.stdout.read()
    # Rank 0 announces its server in the store, or prints why it has none.
    assert entries or b"Error" in output, output
    assert not [one for one in entries if any(word in one for word in WORDS)]
