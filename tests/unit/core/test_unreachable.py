"""Errors for an unreachable endpoint: wrong name, port or network."""

import socket
from types import SimpleNamespace

import pytest

from statsd_bn.endpoints import explain_no_answer
from statsd_bn.text import FIRST_LINE


def network(error: OSError | None) -> SimpleNamespace:
    """A module like `socket`, in which every connection attempt raises `error`, or succeeds if that is None."""

    def create_connection(*_: object) -> SimpleNamespace:
        if error:
            raise error
        return SimpleNamespace(close=lambda: None)

    return SimpleNamespace(create_connection=create_connection, gaierror=socket.gaierror)


@pytest.mark.parametrize(
    ("error", "first"),
    [
        (socket.gaierror(-2, "Name or service not known"), "the name 'host-x' is not known here (Name or service"),
        (ConnectionRefusedError(), "no server listens at tcp://host-x:5555 (connection refused)"),
        (TimeoutError(), "no answer from tcp://host-x:5555 within 5 s"),
        (OSError(113, "No route to host"), "cannot reach tcp://host-x:5555 ([Errno 113] No route to host)"),
        (None, "no answer from tcp://host-x:5555 within 5 s, but a program listens there"),
    ],
)
def test_the_first_line_says_how_the_attempt_ended(error, first):
    text = explain_no_answer("tcp://host-x:5555", 5.0, network(error))
    head, *_, advice = text.splitlines()
    assert head.startswith(first)
    assert len(head) <= FIRST_LINE
    assert advice.endswith((".", "?"))


def test_a_host_name_is_resolved():
    # The top-level domain is reserved for names that do not exist.
    assert "is not known here (" in explain_no_answer("tcp://host.invalid:5555", 5.0, socket).splitlines()[0]


def test_a_port_without_a_listener_refuses():
    with socket.socket() as bound:  # bound without listening, so the port is reserved
        bound.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{bound.getsockname()[1]}"
        expected = f"no server listens at {endpoint} (connection refused)"
        assert explain_no_answer(endpoint, 5.0, socket).startswith(expected)


@pytest.mark.parametrize("family", ["tcp", "ipc"])
def test_another_program_on_the_port_is_recognised(tmp_path, family):
    kind, where = (socket.AF_INET, ("127.0.0.1", 0)) if family == "tcp" else (socket.AF_UNIX, str(tmp_path / "s"))
    with socket.socket(kind) as other:
        other.bind(where)
        other.listen()
        endpoint = f"ipc://{where}" if family == "ipc" else f"tcp://127.0.0.1:{other.getsockname()[1]}"
        assert " but a program listens there" in explain_no_answer(endpoint, 5.0, socket)


def test_a_stale_socket_file_differs_from_a_missing_one(tmp_path):
    path = tmp_path / "s"
    assert "(there is no such file)" in explain_no_answer(f"ipc://{path}", 5.0, socket)
    with socket.socket(socket.AF_UNIX) as former:
        former.bind(str(path))
    assert "(connection refused)" in explain_no_answer(f"ipc://{path}", 5.0, socket)
