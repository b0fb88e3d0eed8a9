"""Text from other processes reaches terminals and logs without control characters."""

import logging
import traceback

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.launch.settings import resolve
from client.session.protocol.member import Member
from client.session.protocol.session import Session
from server.__main__ import MAX_LINE, PlainFormatter, main
from server.core.dispatcher import Dispatcher
from statsd_bn import limits
from statsd_bn.checks import check_depth, short_repr
from statsd_bn.errors import ConfigurationError, ProtocolError, RegistrationRefused, StatsdBNError, from_wire
from statsd_bn.messages import Failure, Leave, Status
from statsd_bn.text import escape, escape_lines, escape_nested, log_line, wire_text
from statsd_bn.wire import PROTOCOL_VERSION, decode, encode, encode_failure
from support.sentences import says
from support.strategies import key, register

HOSTILE = "\x1b[2J\x1b]0;owned\x07\r\n\t\x9b\u202e\u2028\ud800"


def hidden(text: str) -> str:
    return "".join(letter for letter in text if not letter.isprintable() and letter not in "\n\t")


@given(st.text(st.characters()))
def test_an_escaped_text_is_printable_and_a_printable_one_is_unchanged(text):
    assert escape(text).isprintable()
    assert not hidden(escape_lines(text))
    assert escape(escape(text)) == escape(text)
    assert escape_lines(escape_lines(text)) == escape_lines(text)
    if text.isprintable():
        assert escape(text) == escape_lines(text) == text


def test_texts_are_cut_to_the_limit_of_a_message():
    assert wire_text("é" * limits.MAX_TEXT_BYTES) == "é" * (limits.MAX_TEXT_BYTES // 2)
    assert wire_text(HOSTILE) == r"\x1b[2J\x1b]0;owned\x07\r" + "\n\t" + r"\x9b\u202e\u2028\ud800"


def test_every_text_within_values_is_printable():
    found = escape_nested({HOSTILE: [HOSTILE, {"a": HOSTILE}, 1, None, b"\x1b"]})
    assert found == {escape_lines(HOSTILE): [escape_lines(HOSTILE), {"a": escape_lines(HOSTILE)}, 1, None, b"\x1b"]}


def deep(levels: int) -> list:
    found: list = []
    for _ in range(levels - 1):
        found = [found]
    return found


def test_values_nest_32_deep_and_no_deeper():
    check_depth("fields", deep(32))
    with pytest.raises(ProtocolError, match="fields: expected values nested at most 32 deep"):
        check_depth("fields", deep(33))
    assert "..." in repr(escape_nested(deep(1000)))


@pytest.mark.parametrize("levels", [33, 900])
def test_deeper_values_of_a_server_are_refused(levels):
    for message in (Failure("mismatch", "no", {"table": deep(levels)}), Status({"groups": deep(levels)})):
        with pytest.raises(ProtocolError, match="nested at most 32 deep"):
            decode(encode(message))


@given(st.recursive(st.text(st.characters()) | st.binary(), lambda inner: st.lists(inner) | st.tuples(inner)))
def test_displayed_text_is_printable(value):
    assert short_repr(value).isprintable()


def test_an_error_from_the_wire_is_printable():
    error = from_wire("refused", HOSTILE, {"place": HOSTILE, "table": [{"layer": HOSTILE}]})
    assert type(error) is RegistrationRefused
    assert not hidden(str(error) + error.fields["place"] + error.fields["table"][0]["layer"])
    assert type(from_wire(HOSTILE, "", {})) is StatsdBNError


def test_a_cause_with_control_characters_is_escaped():
    session = Session(b"session0", Member("job", "world", 0, 0, 1, 1.0, "here"))
    leave = decode(session.leave(f"ValueError: {HOSTILE}"))
    assert isinstance(leave, Leave)
    assert leave.cause == f"ValueError: {escape_lines(HOSTILE)}"


def test_a_servers_own_error_is_escaped():
    assert decode(encode_failure(ConfigurationError(HOSTILE))).message == escape_lines(HOSTILE)


@pytest.mark.parametrize("job", ["a\nb", "\x1b[2J", "", "x" * 257, "a\u202eb", "\ud800"])
def test_a_job_that_cannot_be_a_name_is_refused_at_once(job):
    with pytest.raises(ConfigurationError, check=says("job: expected printable text of 1 to 256 bytes, got ")):
        resolve({"STATSD_BN_JOB": job} if job else {}, job=job)


def test_an_unusual_job_name_is_accepted():
    assert resolve({}, job="naïve λ 層 🙂").member.job == "naïve λ 層 🙂"


def test_the_place_is_printable_for_any_host_name(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "host\x1b\n")
    assert resolve({}).member.host_and_pid.startswith(r"host\x1b\n, pid ")


def test_a_line_of_the_log_is_short():
    record = logging.LogRecord("x", logging.WARNING, "", 0, "refused: %s", ("\x1b" * 4096,), None)
    line = PlainFormatter("%(levelname)s %(message)s").format(record)
    assert line.isprintable()
    assert line.startswith(r"WARNING refused: \x1b\x1b")
    assert len(line) < MAX_LINE + 40
    assert line.endswith("... (15401 more characters)")
    short = logging.LogRecord("x", logging.INFO, "", 0, "x" * 500, (), None)
    assert PlainFormatter("%(message)s").format(short) == "x" * 500


def framed(*header: object) -> bytes:
    """A frame with an invalid header, as only a hostile peer sends."""
    packed = msgpack.packb(header)
    return b"SBN" + bytes([PROTOCOL_VERSION]) + len(packed).to_bytes(4, "little") + packed


@pytest.mark.parametrize(
    "frame",
    [
        framed(6, "refused", "gone\x1b[2J", {}, None),
        framed(6, "refused\x1b[2J", "gone", {}, None),
        framed(6, "\x1b[2J", "gone", {"\x1b": 1}, None),
        framed(10, msgpack.packb(key()), 1, "late\x1b[2J"),
        framed(10, msgpack.packb((*key()[:-1], "\x1b[2J")), 1, "late"),
        framed(6, "replica_lost", "gone", {"cause": "a\x1b[2J", "table": [{"\x1b[2J": "\x1b[2J"}]}, None),
        framed("\x1b[2J", 1),
        framed(2, "\x1b[2J", 1, 2, 3, 4, 5),
        b"\x1b[2J\x1b[2J\x1b[2J",
    ],
)
def test_a_hostile_server_cannot_control_a_members_terminal(frame):
    session = Session(b"session0", Member("job", "world", 0, 0, 1, 1.0, "here"))
    with pytest.raises(StatsdBNError) as caught:
        session.answer(key(), frame)
    text = "".join(traceback.format_exception(caught.value)) + str(caught.value.fields)
    assert not hidden(text)


def test_a_stranger_with_a_hostile_place_starts_no_group_and_the_log_stays_printable(caplog):
    dispatcher = Dispatcher(b"server-0", 0.0)
    header = msgpack.unpackb(encode(register(place="here"))[8:])
    stranger = framed(*["\x1b[2J\r\n" if field == "here" else field for field in header])
    ((_, answer),) = dispatcher.receive(0.0, b"stranger", stranger).replies
    assert (decode(answer).code, dispatcher.report(0.0)["groups"]) == ("protocol", [])
    assert r"place: expected printable text of 1 to 256 bytes, got '\x1b[2J\r\n'" in decode(answer).message
    assert not hidden(caplog.text)


def test_the_error_of_a_command_is_one_line(monkeypatch, capsys):
    def refused(*_given, **_named):
        raise ConfigurationError(HOSTILE)

    monkeypatch.setattr("server.__main__.ask", refused)
    monkeypatch.setenv("STATSD_BN_INSECURE", "1")
    assert main(["status", "tcp://127.0.0.1:1"]) == 2
    assert capsys.readouterr().err == f"statsd_bn: {log_line(HOSTILE)}\n"
