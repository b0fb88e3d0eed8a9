"""Log level: STATSD_BN_LOG_LEVEL, for a script that does not set up `logging` itself."""

import logging
from collections.abc import Mapping

from statsd_bn.environment import log_level

logger = logging.getLogger("statsd_bn.client")


def follow(environ: Mapping[str, str]) -> None:
    """Logs what the variable says; without it nothing changes. What a script has set up takes the lines.

    Raises:
        ConfigurationError: it names no level.
    """
    if not environ.get("STATSD_BN_LOG_LEVEL"):
        return
    logger.setLevel(log_level(environ, "STATSD_BN_LOG_LEVEL", "").upper())
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
