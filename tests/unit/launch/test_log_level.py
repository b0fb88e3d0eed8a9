"""STATSD_BN_LOG_LEVEL shows the client's log without any logging setup."""

import logging

import pytest

from client.launch import connect
from statsd_bn.errors import ConfigurationError
from support.sentences import says


@pytest.fixture
def logger(monkeypatch):
    logger = logging.Logger("statsd_bn.client")  # noqa: LOG001 - has no parent with handlers of pytest
    monkeypatch.setattr(connect, "logger", logger)
    return logger


@pytest.mark.parametrize("value", ["DEBUG", "debug"])
def test_a_level_in_any_case_is_shown_on_the_error_output(logger, value, capsys):
    connect.set_log_level({"STATSD_BN_LOG_LEVEL": value})
    connect.set_log_level({"STATSD_BN_LOG_LEVEL": value})
    logger.debug("a word")
    assert capsys.readouterr().err.count("DEBUG a word\n") == 1


def test_without_the_variable_nothing_changes(logger):
    connect.set_log_level({})
    assert logger.handlers == []
    assert logger.level == logging.NOTSET


def test_a_script_that_has_set_up_logging_keeps_its_handlers(logger):
    logger.addHandler(mine := logging.NullHandler())
    connect.set_log_level({"STATSD_BN_LOG_LEVEL": "info"})
    assert logger.handlers == [mine]
    assert logger.level == logging.INFO


def test_another_value_is_refused_and_the_error_lists_the_valid_ones(logger):
    with pytest.raises(ConfigurationError, check=says(r"STATSD_BN_LOG_LEVEL: expected one of .*'debug'.*got 'loud'")):
        connect.set_log_level({"STATSD_BN_LOG_LEVEL": "loud"})
    assert logger.level == logging.NOTSET
