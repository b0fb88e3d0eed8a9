import logging

import pytest

from server.__main__ import MAX_PER_PERIOD, PERIOD_SECONDS, RateLimitFilter


@pytest.fixture
def log(caplog):
    logger = logging.getLogger("sparing test")
    logger.now = 0.0
    sparing = RateLimitFilter(lambda: logger.now)
    logger.addFilter(sparing)
    caplog.set_level("INFO", logger.name)
    yield logger, lambda: [record.getMessage() for record in caplog.records]
    logger.removeFilter(sparing)


def test_of_a_flood_of_one_kind_a_few_messages_pass_and_no_other_kind_is_hidden(log):
    logger, messages = log
    for number in range(1000):
        logger.warning("refused: %s", number)
    logger.info("%s leaves", "member 1")
    assert messages() == [*(f"refused: {number}" for number in range(MAX_PER_PERIOD)), "member 1 leaves"]


def test_the_next_period_reports_the_number_of_omitted_messages(log):
    logger, messages = log
    for _ in range(MAX_PER_PERIOD + 7):
        logger.warning("refused: %s", "100%")
    logger.now = PERIOD_SECONDS
    logger.warning("refused: %s", "again")
    logger.warning("refused: %s", "and again")
    assert messages()[-2:] == ["refused: again (7 similar messages were suppressed)", "refused: and again"]


def test_without_omitted_messages_no_number_is_reported(log):
    logger, messages = log
    for _ in range(3):
        logger.warning("refused: %s", "now and then")
        logger.now += PERIOD_SECONDS
    assert messages() == ["refused: now and then"] * 3
