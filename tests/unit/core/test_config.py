import logging
import re

import pytest

import statsd_bn
from server.__main__ import main
from server.config import Config, from_arguments
from statsd_bn.environment import LOG_LEVELS
from statsd_bn.errors import ConfigurationError
from support.sentences import says

OPEN = "tcp://*:5555"


def exit_code(arguments: list[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as ended:
        return ended.code


def test_without_flags_and_environment_it_listens_in_the_users_own_folder(tmp_path, monkeypatch):
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert from_arguments([], environ) == Config() == Config((f"ipc://{tmp_path}/statsd_bn/server",), "info")
    assert list(tmp_path.iterdir()) == [], "a server creates no file before it listens"


def test_each_flag_has_an_environment_variable():
    found = from_arguments(["--bind", OPEN, "--log-level", "debug", "--insecure"], {})
    assert found == Config((OPEN,), "debug", insecure=True)
    twins = {"STATSD_BN_BIND": OPEN, "STATSD_BN_LOG_LEVEL": "error", "STATSD_BN_INSECURE": "1"}
    assert from_arguments([], twins) == Config((OPEN,), "error", insecure=True)


def test_an_empty_variable_is_not_set():
    names = ("STATSD_BN_LOG_LEVEL", "STATSD_BN_CURVE", "STATSD_BN_MAX_GROUPS", "STATSD_BN_BIND")
    assert from_arguments([], dict.fromkeys(names, "")) == Config()


def test_a_flag_overrides_its_environment_variable():
    twins = {"STATSD_BN_BIND": "ipc:///run/1,ipc:///run/2", "STATSD_BN_LOG_LEVEL": "error"}
    found = from_arguments(["--bind", "ipc:///run/3", "--log-level", "warning"], twins)
    assert found == Config(("ipc:///run/3",), "warning")


def test_several_endpoints():
    both = ("ipc:///run/1", "ipc:///run/2")
    assert from_arguments(["--bind", both[0], "--bind", both[1]], {}).bind == both
    assert from_arguments([], {"STATSD_BN_BIND": ",".join(both)}).bind == both
    assert from_arguments([], {"STATSD_BN_BIND": ", ".join(both)}).bind == both


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "localhost", "[::1]", "*", "[::]", "192.168.1.5", "eth0"])
def test_tcp_without_keys_is_refused_unless_insecure(host):
    endpoint = f"tcp://{host}:5555"
    with pytest.raises(ConfigurationError, check=says(re.escape(f"bind: {endpoint} has no keys: TCP needs --curve"))):
        Config(("ipc:///run/statsd-bn", endpoint))
    assert Config((endpoint,), insecure=True).bind == (endpoint,)
    assert Config((endpoint,), curve="keys").bind == (endpoint,)


@pytest.mark.parametrize(
    "endpoint",
    [
        *("5555", "127.0.0.1:5555", "tcp://", "", " tcp://x:1", "tcp://:5555", "tcp://5555", "tcp://127.0.0.1:80x"),
        *("tcp://127.0.0.1", "ws://127.0.0.1:5555", "udp://127.0.0.1:5555", "inproc://here", "ipc://"),
    ],
)
def test_an_invalid_endpoint_is_refused(endpoint):
    with pytest.raises(ConfigurationError, match="bind: expected tcp://HOST:PORT") as caught:
        Config((endpoint,), insecure=True)
    assert repr(endpoint) in str(caught.value)


def test_a_missing_endpoint_is_refused():
    with pytest.raises(ConfigurationError, match="at least one endpoint"):
        Config(())


def test_an_invalid_log_level_from_the_environment_is_refused_with_the_valid_ones():
    with pytest.raises(ConfigurationError, match="got 'loud'") as caught:
        from_arguments([], {"STATSD_BN_LOG_LEVEL": "loud"})
    assert all(level in str(caught.value) for level in LOG_LEVELS)


def test_a_bad_log_level_in_the_environment_is_a_usage_error(monkeypatch, capsys):
    monkeypatch.setenv("STATSD_BN_LOG_LEVEL", "loud")
    assert main([]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert "loud" in output.err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--isecure"], "unknown option --isecure; did you mean --insecure?"),
        (["--max-group=4"], "unknown option --max-group; did you mean --max-groups?"),
        (["serve", "--bnd", "x"], "unknown option --bnd; did you mean --bind?"),
        (["--xyzzy"], "unknown option --xyzzy (see"),
        (["status", "--jsn"], "unknown option --jsn; did you mean --json?"),
        (["sttaus"], "unknown command 'sttaus'; did you mean status?"),
        (["xyzzy"], "unknown command 'xyzzy'; expected one of"),
        (["check", "a", "b"], "unexpected argument 'b'"),
    ],
)
def test_a_mistyped_option_gets_a_suggestion(arguments, text, capsys):
    assert exit_code(arguments) == 2
    assert text in capsys.readouterr().err


def test_insecure_has_many_spellings_and_the_error_about_another_value_lists_them():
    for value in ("1", "true", "YES", "On"):
        assert from_arguments(["--bind", OPEN], {"STATSD_BN_INSECURE": value}).insecure
    for value in ("0", "False", "no", "OFF", ""):
        assert not from_arguments([], {"STATSD_BN_INSECURE": value}).insecure
    expected = says(r"STATSD_BN_INSECURE: expected one of 1, true, .*, got 'perhaps'")
    with pytest.raises(ConfigurationError, check=expected):
        from_arguments([], {"STATSD_BN_INSECURE": "perhaps"})


@pytest.mark.parametrize("level", ["DEBUG", "Debug", "debug"])
def test_a_log_level_may_be_in_upper_or_lower_case(level):
    assert from_arguments([], {"STATSD_BN_LOG_LEVEL": level}).log_level == "debug"
    assert from_arguments(["--log-level", level], {"STATSD_BN_LOG_LEVEL": "loud"}).log_level == "debug"


def test_the_version_is_that_of_the_package_and_the_protocol(capsys):
    assert exit_code(["--version"]) == 0
    assert capsys.readouterr().out == f"statsd-bn {statsd_bn.__version__} (protocol {statsd_bn.PROTOCOL_VERSION})\n"


@pytest.mark.parametrize("level", LOG_LEVELS)
def test_log_levels_are_those_of_logging(level):
    assert Config(log_level=level).logging_level == getattr(logging, level.upper())


def test_only_a_server_with_a_parent_may_be_the_successor_of_a_killed_one():
    assert from_arguments(["--parent", "12", "--again"], {}).again
    assert not from_arguments(["--parent", "12"], {}).again
    with pytest.raises(ConfigurationError, match="again: expected a parent with it, got none"):
        from_arguments(["--again"], {})
