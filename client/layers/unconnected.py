"""Warns once where the launcher has started several processes and this one trains without a connection."""

import logging
import os

from client.connection import current

logger = logging.getLogger("statsd_bn.client")


class Unconnected:
    """Remembers whether it has warned."""

    def __init__(self) -> None:
        self._is_told = False

    def tell(self, layer: str) -> None:
        """Warns, the first time, if the launcher has started more processes, and this one has never been connected."""
        if self._is_told:
            return
        self._is_told = True
        processes = os.environ.get("WORLD_SIZE", "")
        if processes.isdecimal() and int(processes) > 1 and not current.has_been_connected():
            logger.warning(
                "WORLD_SIZE is %s, and this process is not connected: layer %r normalises its batch alone; call "
                "client.connect() before training",
                processes,
                layer,
            )


unconnected = Unconnected()
