"""A query survives a restart of the server, and matches answers to requests."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from server.cli.status import query_connection
from statsd_bn.errors import ServerUnreachable
from statsd_bn.messages import FiguresRequest, StatusRequest
from statsd_bn.wire import decode

WAIT_MILLISECONDS = 20_000

# How long a query waits for a server that never answers, the time to connect included.
UNANSWERED_SECONDS = 2.0


class Fake:
    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.questions: list[str] = []

    def takes(self, *answers: bytes) -> None:
        """A server that gives these answers, receives another request, and ends without answering it."""
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.linger = 0
            router.bind(self.endpoint)
            for answer in answers:
                router.send_multipart([self._question(router), answer])
            self._question(router)

    def answers(self, *answers: bytes) -> None:
        """A server that gives these answers, and ends."""
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.linger = WAIT_MILLISECONDS
            router.bind(self.endpoint)
            for answer in answers:
                router.send_multipart([self._question(router), answer])

    def _question(self, router: "zmq.Socket[bytes]") -> bytes:
        assert router.poll(WAIT_MILLISECONDS), "nobody asks"
        who, question = router.recv_multipart()
        self.questions.append(type(decode(question)).__name__)
        return who


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(f"ipc://{tmp_path}/server")


@pytest.mark.parametrize(
    ("first", "second", "questions"),
    [
        ([], [b"first", b"second"], ["StatusRequest", "StatusRequest", "FiguresRequest"]),
        ([b"first"], [b"second"], ["StatusRequest", "FiguresRequest", "FiguresRequest"]),
    ],
    ids=["the first question", "the second one"],
)
def test_a_question_lost_with_a_server_is_sent_to_the_next(fake, first, second, questions):
    def in_turn() -> None:
        fake.takes(*first)
        fake.answers(*second)

    with ThreadPoolExecutor(1) as pool:
        servers = pool.submit(in_turn)
        with query_connection(fake.endpoint, WAIT_MILLISECONDS / 1000) as ask:
            assert ask(StatusRequest()) == b"first"
            assert ask(FiguresRequest("job", "world", 0)) == b"second"
        servers.result()
    assert fake.questions == questions


def test_the_query_gives_up_in_time_if_every_server_loses_it(fake):
    def in_turn() -> None:
        fake.takes()
        fake.takes()

    with ThreadPoolExecutor(1) as pool:
        servers = pool.submit(in_turn)
        with query_connection(fake.endpoint, UNANSWERED_SECONDS) as ask, pytest.raises(ServerUnreachable) as caught:
            ask(StatusRequest())
        servers.result()
    assert caught.value.fields["seconds"] == UNANSWERED_SECONDS
    assert fake.questions == ["StatusRequest", "StatusRequest"]
