import dataclasses
import logging

import pytest

from server.__main__ import main
from server.config import DEFAULT_ENDPOINT, LOG_LEVELS, Config, from_arguments, is_local
from statsd_bn.errors import ConfigurationError

OPEN = "tcp://*:5555"


def test_without_flags_and_environment_it_listens_on_loopback():
    assert from_arguments([], {}) == Config() == Config((DEFAULT_ENDPOINT,), "info", insecure=False)
    assert is_local(DEFAULT_ENDPOINT)


def test_flags():
    found = from_arguments(["--bind", OPEN, "--log-level", "debug", "--insecure"], {})
    assert found == Config((OPEN,), "debug", insecure=True)


def test_environment_twins():
    twins = {"STATSD_BN_BIND": OPEN, "STATSD_BN_LOG_LEVEL": "error", "STATSD_BN_INSECURE": "1"}
    assert from_arguments([], twins) == Config((OPEN,), "error", insecure=True)


def test_an_empty_variable_is_not_set():
    assert from_arguments([], {"STATSD_BN_LOG_LEVEL": "", "STATSD_BN_CURVE": "", "STATSD_BN_MAX_JOBS": ""}) == Config()


def test_a_flag_wins_over_its_twin():
    twins = {"STATSD_BN_BIND": "tcp://127.0.0.1:1,tcp://127.0.0.1:2", "STATSD_BN_LOG_LEVEL": "error"}
    found = from_arguments(["--bind", "tcp://127.0.0.1:3", "--log-level", "warning"], twins)
    assert found == Config(("tcp://127.0.0.1:3",), "warning")


def test_several_endpoints():
    both = ("tcp://127.0.0.1:*", "ipc:///run/statsd-bn")
    assert from_arguments(["--bind", both[0], "--bind", both[1]], {}).bind == both
    assert from_arguments([], {"STATSD_BN_BIND": ",".join(both)}).bind == both


@pytest.mark.parametrize("value", ["0", "", "no", "false"])
def test_insecure_in_the_environment_is_1_and_nothing_else(value):
    assert not from_arguments([], {"STATSD_BN_INSECURE": value}).insecure


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://127.0.0.1:5555",
        "tcp://127.8.9.10:*",
        "tcp://localhost:5555",
        "tcp://[::1]:5555",
        "ipc:///tmp/statsd-bn",
        "ipc://@abstract",
        "ipc://*",
    ],
)
def test_an_endpoint_that_only_this_machine_reaches_needs_no_word(endpoint):
    assert is_local(endpoint)
    assert Config((endpoint,)).bind == (endpoint,)


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://*:5555",
        "tcp://0.0.0.0:5555",
        "tcp://[::]:5555",
        "tcp://192.168.1.5:5555",
        "tcp://eth0:5555",
        "tcp://128.0.0.1:5555",
        "tcp://example.127.org:5555",
        "tcp://:5555",
        "tcp://5555",
    ],
)
def test_an_endpoint_that_others_reach_is_refused_unless_insecure(endpoint):
    assert not is_local(endpoint)
    with pytest.raises(ConfigurationError, match="can be reached from other machines") as caught:
        Config((DEFAULT_ENDPOINT, endpoint))
    assert endpoint in str(caught.value)
    assert "--insecure" in str(caught.value)
    assert Config((endpoint,), insecure=True).bind == (endpoint,)


@pytest.mark.parametrize("endpoint", ["5555", "127.0.0.1:5555", "tcp://", "", " tcp://x:1"])
def test_what_is_no_endpoint_is_refused(endpoint):
    with pytest.raises(ConfigurationError, match="expected a ZeroMQ endpoint such as tcp://HOST:PORT") as caught:
        Config((endpoint,), insecure=True)
    assert repr(endpoint) in str(caught.value)


def test_no_endpoint_at_all_is_refused():
    with pytest.raises(ConfigurationError, match="at least one endpoint"):
        Config(())


def test_a_bad_log_level_from_the_environment_is_refused_with_the_good_ones():
    with pytest.raises(ConfigurationError, match="got 'loud'") as caught:
        from_arguments([], {"STATSD_BN_LOG_LEVEL": "loud"})
    assert all(level in str(caught.value) for level in LOG_LEVELS)


def test_a_bad_log_level_in_the_environment_is_a_usage_error(monkeypatch, capsys):
    monkeypatch.setenv("STATSD_BN_LOG_LEVEL", "loud")
    assert main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "loud" in said.err


def test_an_endpoint_that_others_reach_is_a_usage_error(capsys):
    assert main(["--bind", OPEN]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert OPEN in said.err


@pytest.mark.parametrize("arguments", [["--log-level", "loud"], ["--bind"], ["--colour"], ["status"], ["sttaus", "x"]])
def test_bad_flags_are_usage_errors(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: python -m server" in capsys.readouterr().err


@pytest.mark.parametrize("level", LOG_LEVELS)
def test_log_levels_are_those_of_logging(level):
    assert Config(log_level=level).logging_level == getattr(logging, level.upper())


def test_a_configuration_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().insecure = True


def test_only_a_server_with_a_parent_stands_in_for_one_that_was_killed():
    assert from_arguments(["--parent", "12", "--again"], {}).again
    assert not from_arguments(["--parent", "12"], {}).again
    with pytest.raises(ConfigurationError, match="again: expected a parent with it, got none"):
        from_arguments(["--again"], {})


def test_a_parent_is_the_id_of_a_process():
    assert from_arguments(["--parent", "12"], {}).parent == 12
    assert from_arguments([], {}).parent is None
    with pytest.raises(ConfigurationError, match="parent: expected the id of a process, got 0"):
        from_arguments(["--parent", "0"], {})
