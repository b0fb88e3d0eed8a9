"""Memory is handed only to processes of this user on this host."""

import gc
import os
import socket
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from client.transports import group_memory
from client.transports.group_memory import MemoryOffer, receive_memory
from support.paths import ROOT

pytestmark = pytest.mark.skipif(bool(group_memory.unavailable_reason()), reason=group_memory.unavailable_reason())

SIZE = 8192


@pytest.fixture
def offer():
    with closing(MemoryOffer(SIZE)) as one:
        yield one


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_one_member_reads_the_memory_of_the_other(offer):
    memory = receive_memory(offer.name, SIZE)
    memory[:5] = b"hello"
    assert offer.memory[:5] == b"hello"
    offer.memory[-1:] = b"!"
    assert memory[-1:] == b"!"


def test_no_file_or_descriptor_remains():
    before = open_files()
    with closing(MemoryOffer(SIZE)) as offer:
        memory = receive_memory(offer.name, SIZE)
        # The memory is no file in a folder.
        assert "/memfd:statsd_bn" in Path("/proc/self/maps").read_text()
    memory.close()
    offer.memory.close()
    assert open_files() == before


@pytest.fixture
def late(offer, monkeypatch):
    may, user_of = threading.Event(), group_memory._user_of

    def late_user_of(peer):
        if threading.current_thread() is offer._thread:
            assert may.wait(60.0)
        return user_of(peer)

    monkeypatch.setattr(group_memory, "_user_of", late_user_of)
    monkeypatch.setattr(group_memory, "CHECK_SECONDS", 0.01)
    yield may
    may.set()


def test_late_memory_is_awaited(offer, late):
    checks = []

    def is_broken():
        checks.append(1)
        if len(checks) == 3:
            late.set()
        return False

    assert len(receive_memory(offer.name, SIZE, is_broken)) == SIZE
    assert len(checks) >= 3


@pytest.mark.usefixtures("late")
def test_no_member_waits_for_memory_in_a_broken_job(offer):
    checks = []

    def is_broken():
        checks.append(1)
        return True

    with pytest.raises(TimeoutError):
        receive_memory(offer.name, SIZE, is_broken)
    assert checks == [1]


def test_without_an_offer_the_error_gives_the_reason():
    with pytest.raises(OSError, match="on another host, or in another container"):
        receive_memory("statsd_bn-nobody", SIZE)


def test_memory_of_another_size_is_refused(offer):
    with pytest.raises(OSError, match="has 8192 bytes, expected 4096"):
        receive_memory(offer.name, 4096)


def test_another_user_gets_nothing(offer, monkeypatch):
    monkeypatch.setattr(group_memory.os, "getuid", lambda: os.geteuid() + 1)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(10)
        stranger.connect(f"\0{offer.name}")
        assert socket.recv_fds(stranger, 1, 1)[:2] == (b"", [])


def test_another_users_memory_is_not_taken(offer, monkeypatch):
    monkeypatch.setattr(group_memory, "_user_of", lambda _: 12345)
    with pytest.raises(OSError, match="belongs to uid 12345"):
        receive_memory(offer.name, SIZE)


def test_the_overflow_user_shares_nothing():
    """In a new user namespace the process has the overflow id, which all users without a mapping share."""
    command = [
        "unshare",
        "--user",
        sys.executable,
        "-c",
        "import support.without_torch; from client.transports.group_memory import *; print(unavailable_reason())",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs user namespaces")
    assert "is the overflow uid of this container" in done.stdout


def test_the_overflow_user_shares_memory_where_all_users_are_mapped(monkeypatch):
    if Path("/proc/self/uid_map").read_text().split() != ["0", "0", str(2**32 - 1)]:
        pytest.skip("is in a user namespace itself")
    monkeypatch.setattr(group_memory.os, "getuid", lambda: 65_534)
    assert group_memory.unavailable_reason() == ""


def test_the_memory_cannot_be_truncated(offer):
    """A process that reads beyond the end would get SIGBUS."""
    with pytest.raises(PermissionError):
        os.ftruncate(offer._descriptor, 0)


def test_memory_that_could_be_truncated_is_refused(offer, monkeypatch):
    bare = os.memfd_create("bare", os.MFD_CLOEXEC)
    os.ftruncate(bare, SIZE)
    monkeypatch.setattr(offer, "_descriptor", bare)
    with pytest.raises(OSError, match="is not sealed"):
        receive_memory(offer.name, SIZE)


def test_an_offer_that_fails_leaves_nothing_open(monkeypatch):
    def refuse(_self):
        raise RuntimeError("no more threads; on purpose")

    gc.collect()  # closes descriptors of earlier tests
    before = open_files()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="no more threads"):
        MemoryOffer(SIZE)
    gc.collect()
    assert open_files() == before
