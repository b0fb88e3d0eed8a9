"""Unfinished requests block no other reader, and are dropped soon."""

import contextlib
import resource
import socket
import time
from http.client import HTTPConnection

import pytest

from server.view.web import MAX_WAITING, REQUEST_BYTES, REQUEST_SECONDS
from support.view_reports import view_page

pytest.importorskip("uvicorn", reason="needs the extra view")

# More connections than the page may have files.
FILES, CONNECTIONS = 256, 300

# Limit for an answer of the page on a busy machine.
ANSWER_SECONDS = 5.0


def page(endpoint):
    return view_page(endpoint, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES)))


def half_sent(port):
    client = socket.create_connection(("127.0.0.1", port), ANSWER_SECONDS)
    client.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Rest:")
    return client


def status(port):
    with contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)) as to:
        to.request("GET", "/")
        return to.getresponse().status


def whole(connection):
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while some := connection.recv(4096):
            data += some
    return data


def is_dropped(connection, seconds):
    connection.settimeout(seconds)
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


def test_hundreds_of_unfinished_requests_leave_room_for_others_and_are_dropped_quietly(server):
    with page(server.endpoint) as (process, port, _), contextlib.ExitStack() as stack:
        clients = [stack.enter_context(half_sent(port)) for _ in range(CONNECTIONS)]
        began = time.monotonic()
        assert [status(port) for _ in range(20)] == [401] * 20
        assert time.monotonic() - began < ANSWER_SECONDS
        assert all(is_dropped(connection, REQUEST_SECONDS + ANSWER_SECONDS) for connection in clients)
        assert status(port) == 401
        process.kill()
        assert process.stderr.read() == ""


def test_a_request_that_comes_letter_by_letter_is_dropped(server):
    with page(server.endpoint) as (_, port, _), half_sent(port) as client:
        began = time.monotonic()
        with pytest.raises((ConnectionResetError, BrokenPipeError)):  # noqa: PT012 - some letters go through
            while time.monotonic() < began + REQUEST_SECONDS + ANSWER_SECONDS:
                client.sendall(b"x")
                time.sleep(0.1)
        assert time.monotonic() - began > REQUEST_SECONDS / 2


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET / HTTP/1.1\r\nX-Rest:", b"401"),
        (b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\nx", b"405"),
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Rest: " + b"x" * (REQUEST_BYTES + 1), b"4"),
    ],
    ids=["second request", "body", "too long"],
)
def test_a_further_or_too_long_request_is_answered_before_its_end(server, data, status):
    with page(server.endpoint) as (_, port, _), socket.create_connection(("127.0.0.1", port), ANSWER_SECONDS) as client:
        client.sendall(data)
        assert whole(client).startswith(b"HTTP/1.1 " + status)


def test_garbage_is_not_logged(server):
    with page(server.endpoint) as (process, port, _):
        for _ in range(2 * MAX_WAITING):
            with socket.create_connection(("127.0.0.1", port), ANSWER_SECONDS) as client:
                client.sendall(b"\x00garbage\r\n\r\n")
                client.recv(4096)
        process.kill()
        assert process.stderr.read() == ""
