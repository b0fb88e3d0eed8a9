"""Endpoints: this user's own server is found; TCP needs keys, and shared folders are refused."""

import errno
import os
import re
import shutil
import socket
import stat
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

import client
from client.launch import connect
from programs.other_user import NOBODY, needs_another_user
from server import __main__ as command
from server.cli import status
from server.cli.status import ask
from server.config import from_arguments
from server.network.service import Service
from statsd_bn import endpoints
from statsd_bn.errors import AuthenticationRefused, ConfigurationError, ServerUnreachable
from statsd_bn.text import unwrap
from support.launched import Launched
from support.paths import ROOT
from support.sentences import says


@pytest.fixture
def environ(monkeypatch, tmp_path_factory):
    """Sets a runtime folder of this user that every user may read."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.delenv("STATSD_BN_BIND", raising=False)
    monkeypatch.delenv("STATSD_BN_ENDPOINT", raising=False)
    tmp_path_factory.getbasetemp()  # create it before `tempdir` changes below
    # Hide a server of the user who runs the tests.
    monkeypatch.setattr(endpoints, "RUNTIME_FOLDERS", Path("/nowhere"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield {"XDG_RUNTIME_DIR": str(folder)}
    shutil.rmtree(folder)


def test_the_default_socket_is_in_the_users_runtime_folder_or_a_temporary_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = tmp_path / f"statsd_bn-{os.getuid()}"
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    for named in ("", "relative", "/nowhere", str(tmp_path / "file"), str(tmp_path / "link")):
        assert endpoints.user_folders({"XDG_RUNTIME_DIR": named})[0] == own
    assert endpoints.user_folders({"XDG_RUNTIME_DIR": str(tmp_path)})[0] == tmp_path / "statsd_bn"


@pytest.fixture
def nowhere(monkeypatch):
    """Leaves no writable folder, as in a read-only container."""

    def nothing():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(endpoints, "tempfile", SimpleNamespace(gettempdir=nothing))
    monkeypatch.setattr(endpoints, "RUNTIME_FOLDERS", Path("/nowhere"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)


@pytest.mark.usefixtures("nowhere")
def test_an_unwritable_folder_is_an_error_with_a_remedy():
    for use in (endpoints.user_folders, endpoints.default_endpoint, endpoints.find_server):
        with pytest.raises(ConfigurationError, check=says(r"none that can be written; set XDG_RUNTIME_DIR or .*name")):
            use({})


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_a_server_with_an_endpoint_needs_no_writable_default_folder(tmp_path, scheme):
    endpoint = {"tcp": "tcp://127.0.0.1:*", "ipc": f"ipc://{tmp_path}/s"}[scheme]
    with Service(from_arguments(["--insecure", "--bind", endpoint], {})) as service:
        assert service.endpoints


def test_a_server_that_was_started_where_there_was_no_runtime_folder_is_found(environ, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    endpoint = endpoints.default_endpoint({})
    folder = Path(endpoint.removeprefix("ipc://")).parent
    endpoints.make_private_folder(folder)
    with Service(from_arguments(["--bind", endpoint], {})):
        assert endpoint.startswith(f"ipc://{tmp_path}/statsd_bn-")
        assert endpoints.find_server(environ) == endpoint
        folder.chmod(0o777)
        expected = says(rf"at ipc://{environ['XDG_RUNTIME_DIR']}\S* or {endpoint}; start")
        with pytest.raises(ServerUnreachable, check=expected):
            endpoints.find_server(environ)


def test_a_path_too_long_for_a_socket_is_an_error_with_a_remedy(tmp_path):
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    with pytest.raises(ConfigurationError, check=says(r"at most 10[37] bytes for the path of a socket, got .*TMPDIR")):
        endpoints.default_endpoint({"XDG_RUNTIME_DIR": str(deep)})


def test_a_folder_is_made_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        endpoints.make_private_folder(tmp_path / "own")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "own").stat().st_mode) == 0o700
    endpoints.make_private_folder(tmp_path / "own")


def shared(path, mode):
    path.mkdir()
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda path: shared(path, 0o777), "has mode 0777; give a folder of your own"),
        (lambda path: shared(path, 0o1777), "has mode 1777; give a folder of your own"),
        (lambda path: path.write_text(""), "to be a folder; remove it"),
    ],
)
def test_a_shared_folder_or_a_file_in_its_place_is_refused_by_server_and_client(environ, make, error, capsys):
    make(Path(environ["XDG_RUNTIME_DIR"]) / "statsd_bn")
    with pytest.raises(ConfigurationError, check=says(error)):
        Service(from_arguments([], environ))
    with pytest.raises(ConfigurationError, check=says(error)):
        endpoints.find_server(environ)
    assert command.main([]) == 2
    assert error in unwrap(capsys.readouterr().err)


CLIENTS = {
    "connect": lambda endpoint: client.connect(endpoint, rank=0, world_size=2),
    "ask": ask,
    **{name: lambda endpoint, name=name: command.main([name, endpoint]) for name in ("status", "check", "view")},
}


def refusal(use, capsys):
    """The first error of a client or a server, raised or printed."""
    try:
        code = use()
    except ConfigurationError as error:
        return error.message
    assert code == 2
    return unwrap(capsys.readouterr().err)


@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.parametrize(("above", "mode"), [(0o755, 0o777), (0o755, 0o1777), (0o777, 0o755)])
def test_a_named_socket_in_a_folder_that_others_can_write_to_is_refused_by_both_sides(
    environ, name, above, mode, capsys
):
    """Another user could put the socket of a false server there."""
    top = Path(environ["XDG_RUNTIME_DIR"])
    top.chmod(above)
    endpoint = f"ipc://{shared(top / 'shared', mode)}/s"
    pattern = (
        rf"expected a socket in a folder that other users cannot write to, got {top}/shared, and \S+ has mode [01]777"
    )
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(endpoint.removeprefix("ipc://"))
        other.listen()
        for use in (lambda: CLIENTS[name](endpoint), lambda: command.main(["--bind", endpoint])):
            assert re.search(pattern, refusal(use, capsys))


def test_a_folder_of_this_user_in_a_sticky_folder_and_a_folder_below_a_private_one_are_safe(environ):
    top = Path(environ["XDG_RUNTIME_DIR"])
    top.chmod(0o1777)
    endpoints.check_folder(shared(top / "own", 0o755))
    top.chmod(0o777)
    endpoints.check_folder(shared(shared(top / "private", 0o700) / "below", 0o755))


@needs_another_user
@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.parametrize("theirs", ["folder", "socket", "link"])
def test_a_socket_or_folder_of_another_user_is_refused_by_clients(environ, name, theirs, capsys):
    folder = shared(Path(environ["XDG_RUNTIME_DIR"]) / "theirs", 0o755)
    path = folder / "s"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(folder / "bound"))
        other.listen()
        path.symlink_to(folder / "bound")
        changed = {"folder": folder, "socket": folder / "bound", "link": path}[theirs]
        os.chown(changed, NOBODY, NOBODY, follow_symlinks=False)
        error = refusal(lambda: CLIENTS[name](f"ipc://{path}"), capsys)
    assert f"to belong to this user (uid 0) or to root, got uid {NOBODY}" in error


@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.parametrize("endpoint", ["ipc://@abstract", "ipc://@", "ipc://*"])
def test_a_socket_in_no_folder_is_refused_by_both_sides(name, endpoint, capsys):
    """Every user of the host could connect, and end the server by floods of PING on connections that break off."""
    for use in (lambda: CLIENTS[name](endpoint), lambda: command.main(["--insecure", "--bind", endpoint])):
        kind = "a random path" if endpoint == "ipc://*" else "an abstract socket"
        error = f"expected ipc://PATH in a folder that other users cannot write to, got '{endpoint}', {kind}"
        assert error in refusal(use, capsys)


def test_a_folder_that_its_group_can_write_to_is_warned_of(environ, caplog):
    folder = shared(Path(environ["XDG_RUNTIME_DIR"]) / "group", 0o775)
    with Service(from_arguments(["--bind", f"ipc://{folder}/s"], {})):
        assert f"the group of {folder} can write to it" in caplog.text
    caplog.clear()
    folder.chmod(0o755)
    with Service(from_arguments(["--bind", f"ipc://{folder}/s"], {})):
        assert not caplog.records


@pytest.mark.parametrize("name", ["connect", "status", "view"])
@pytest.mark.parametrize("host", ["127.0.0.1", "server.example"])
def test_a_client_without_a_key_connects_by_tcp_only_with_insecure(name, host, capsys, monkeypatch):
    endpoint = f"tcp://{host}:5555"
    error = f"not connected to {endpoint}: TCP needs a key, and this client has none; pass connect(curve="
    monkeypatch.delenv("STATSD_BN_CURVE", raising=False)
    monkeypatch.setattr(zmq.Socket, "connect", lambda *_: pytest.fail("it connects"))
    if name == "connect":
        with pytest.raises(AuthenticationRefused, check=says(re.escape(error))) as caught:
            CLIENTS[name](endpoint)
        assert caught.value.fields == {"reason": "no key"}
    else:
        assert CLIENTS[name](endpoint) == 5
        assert error in unwrap(capsys.readouterr().err)


@needs_another_user
def test_a_folder_of_another_user_is_refused_by_server_and_client(environ):
    folder = Path(environ["XDG_RUNTIME_DIR"]) / "statsd_bn"
    folder.mkdir(mode=0o700)
    os.chown(folder, NOBODY, NOBODY)
    for use in (lambda: Service(from_arguments([], environ)), lambda: endpoints.find_server(environ)):
        with pytest.raises(ConfigurationError, check=says(f"to belong to this user .*got uid {NOBODY}")):
            use()


@pytest.mark.parametrize(
    "call", [lambda: command.main(["check"]), lambda: client.connect(rank=0, world_size=1, policy="elastic").close()]
)
def test_a_server_that_has_only_just_been_started_is_found(environ, tmp_path, monkeypatch, call):
    for module in (status, connect):
        monkeypatch.setattr(module, "FIND_SECONDS", 60.0)
    variables = {**environ, "PYTHONPATH": str(ROOT)}
    with Launched([sys.executable, "-m", "server"], variables, tmp_path / "errors"):
        assert not call()


def test_a_missing_server_of_this_user_is_reported(environ, capsys, monkeypatch):
    monkeypatch.setattr(status, "FIND_SECONDS", 0.0)
    for arguments in (["check"], ["status"]):
        assert command.main(arguments) == 4
        error = unwrap(capsys.readouterr().err)
        assert f"no server of this user (uid {os.getuid()}) listens at ipc://{environ['XDG_RUNTIME_DIR']}" in error
        assert "torchrun" not in error
    assert not list(Path(environ["XDG_RUNTIME_DIR"]).iterdir()), "a search creates nothing"


def test_a_socket_that_a_killed_server_left_behind_is_not_taken_for_a_server(environ):
    endpoint = endpoints.default_endpoint(environ)
    path = Path(endpoint.removeprefix("ipc://"))
    endpoints.make_private_folder(path.parent)
    with socket.socket(socket.AF_UNIX) as former:
        former.bind(str(path))
    with pytest.raises(ServerUnreachable, match=r"no server listens at .* \(connection\s+refused\)"):
        ask(endpoints.find_server(environ), 0.2)
