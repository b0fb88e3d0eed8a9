"""ipc paths of a server: no foreign file is removed, and no running server is displaced."""

import errno
import fcntl
import os
import signal
import socket
import stat
import threading
from contextlib import nullcontext

import pytest

from server import Config, Service
from server.cli.status import ask
from server.network import listener
from statsd_bn.errors import BindError
from support.memory_members import wait_until
from support.sentences import says


@pytest.fixture
def path(tmp_path):
    return tmp_path / "s"


@pytest.fixture
def serve(path):
    services = []

    def run():
        service = Service(Config((f"ipc://{path}",)))
        thread = threading.Thread(target=service.run)
        thread.start()
        services.append((service, thread))
        return services[-1]

    yield run
    for service, thread in services:
        if thread.is_alive():
            end(service, thread)


def end(service, thread):
    service.stop()
    thread.join(20.0)
    service.close()


@pytest.mark.parametrize("kind", ["file", "folder", "link to a file", "link to nothing", "pipe"])
def test_a_file_other_than_a_socket_is_left_alone(path, tmp_path, kind):
    (tmp_path / "other").write_text("precious")
    make = {
        "file": lambda: path.write_text("precious"),
        "folder": path.mkdir,
        "link to a file": lambda: path.symlink_to(tmp_path / "other"),
        "link to nothing": lambda: path.symlink_to(tmp_path / "nothing"),
        "pipe": lambda: os.mkfifo(path),
    }
    make[kind]()
    before = path.lstat()
    with pytest.raises(BindError, match=r"the path exists and is no socket"):
        Service(Config((f"ipc://{path}",)))
    assert path.lstat().st_ino == before.st_ino
    assert (tmp_path / "other").read_text() == "precious"


def test_a_path_where_a_server_listens_is_not_taken_over(path, serve):
    serve()
    number = ask(f"ipc://{path}")["server"]
    with pytest.raises(BindError, match="a running server listens there"):
        Service(Config((f"ipc://{path}",)))
    assert ask(f"ipc://{path}")["server"] == number


def test_one_of_several_starting_servers_gets_the_path(path, monkeypatch):
    bound_first, never = threading.Event(), threading.Event()

    def slow_bind(bound, path):
        bound.bind(str(path))
        bound_first.set()
        never.wait(0.1)
        bound.listen()

    monkeypatch.setattr(listener, "_bind", slow_bind)
    with socket.socket(socket.AF_UNIX) as former:
        former.bind(str(path))
    services, errors = [], []

    def start():
        try:
            services.append(Service(Config((f"ipc://{path}",))))
        except BindError as error:
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(8)]
    threads[0].start()
    assert bound_first.wait(20.0)
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert (len(services), len(errors)) == (1, 7)
    services[0].close()
    assert not path.exists()


def test_a_folder_locked_by_another_process_is_an_error(path, tmp_path, monkeypatch):
    monkeypatch.setattr(listener, "LOCK_SECONDS", 0.05)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(BindError, match=r"another process has locked .* for 0\.05 s"):
            Service(Config((f"ipc://{path}",)))
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(("number", "is_served"), [(errno.ENOLCK, True), (errno.EOPNOTSUPP, True), (errno.EIO, False)])
def test_a_file_system_without_locks_works(path, monkeypatch, number, is_served):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    refused = pytest.raises(BindError, check=says(r"cannot listen on .*: Input/output error"))
    with nullcontext() if is_served else refused:
        Service(Config((f"ipc://{path}",))).close()


def test_the_socket_is_private_whatever_the_umask(path, serve):
    before = os.umask(0)
    try:
        serve()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert os.umask(0) == 0
    finally:
        os.umask(before)


def test_a_server_leaves_the_file_of_another_that_has_taken_its_path(path, serve):
    first = serve()
    path.unlink()
    serve()
    number = ask(f"ipc://{path}")["server"]
    end(*first)
    assert ask(f"ipc://{path}")["server"] == number


def test_a_path_that_is_too_long_is_an_error(tmp_path):
    with pytest.raises(BindError, check=says(r"cannot listen on ipc://.*: AF_UNIX path too long")):
        Service(Config((f"ipc://{tmp_path}/{'x' * 120}",)))


def test_a_frozen_server_keeps_its_path(path):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with socket.socket(socket.AF_UNIX) as frozen:
            frozen.bind(str(path))
            frozen.listen()
            os.write(writer, b"x")
            signal.pause()
        os._exit(0)
    try:
        os.read(reader, 1)
        os.kill(child, signal.SIGSTOP)
        with pytest.raises(BindError, match="a running server listens there"):
            Service(Config((f"ipc://{path}",)))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)
    wait_until(lambda: not listener._is_in_use(path))
