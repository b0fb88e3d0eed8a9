"""`status --watch` redraws the status in place."""

import io
import json
from functools import partial

import pytest

from server import __main__ as command
from server.cli.status import watch
from statsd_bn.errors import ServerUnreachable
from support.view_reports import group, member, report


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def paused(times: int):
    left = iter(range(times - 1))

    def pause(seconds: float) -> None:
        assert seconds == 1.0
        if next(left, None) is None:
            raise KeyboardInterrupt

    return pause


def test_a_terminal_is_cleared_once_and_then_overwritten():
    texts = iter(["one\ntwo", "three"])
    out = Terminal()
    watch(lambda: next(texts), out, paused(2))
    assert out.getvalue() == "\x1b[2J\x1b[Hone\x1b[K\ntwo\x1b[K\n\x1b[J\x1b[Hthree\x1b[K\n\x1b[J\n"


def test_a_file_gets_plain_text():
    out = io.StringIO()
    watch(lambda: "one", out, paused(3))
    assert out.getvalue() == "one\n" * 3


def test_a_lost_server_is_reported_and_asked_again():
    answers = iter(["one", ServerUnreachable("nobody listens\nIs it there?"), "two"])

    def text() -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    out = io.StringIO()
    watch(text, out, paused(3))
    assert out.getvalue() == "one\nnobody listens; Is it there?\ntwo\n"


def test_the_watch_ends_without_a_server_at_the_start():
    def text() -> str:
        raise ServerUnreachable("nobody listens")

    with pytest.raises(ServerUnreachable):
        watch(text, io.StringIO(), paused(1))


def test_a_report_is_json_on_one_line(monkeypatch, capsys, tmp_path):
    answer = {"b": 1, "a": "é\n", "groups": []}
    monkeypatch.setattr(command, "ask", lambda *_, **__: answer)
    assert command.main(["status", f"ipc://{tmp_path}/server", "--json"]) == 0
    text = capsys.readouterr().out
    assert text == '{"a": "é\\n", "b": 1, "groups": []}\n'
    assert json.loads(text) == answer


def test_nothing_of_a_malformed_report_is_shown_later(monkeypatch):
    whole = group(member(0), member(1))
    malformed = {name: value for name, value in whole.items() if name != "min_members"}
    reports, out = iter([report(whole), report(malformed), report()]), io.StringIO()
    monkeypatch.setattr(command, "ask", lambda *_, **__: next(reports))
    monkeypatch.setattr(command, "watch", partial(watch, out=out, pause=paused(3)))
    monkeypatch.setenv("STATSD_BN_INSECURE", "1")
    assert command.main(["status", "--watch", "tcp://127.0.0.1:1"]) == 0
    assert [text.splitlines()[0] for text in out.getvalue().split("digits: ")[1:]] == [
        "Healthy: all 2 ranks take part, no NaN so far",
        "The server does not answer: expected a status report of this version,",
        "Finished in good order: 2 ranks, 100 rounds",
    ]
