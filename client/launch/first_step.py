"""FirstStep: tells of a connection's first training step, how many layers it has synchronised, or that none has.

Whoever forgets `client.convert_model` is told when an optimizer steps for the second time, or when a backward pass is
seen 20 seconds after the start, not at the end of the run. In the first step another network's optimizer may step
before any layer of ours runs, as a critic's. One that is made anew for each step never steps twice.
"""

import logging
from weakref import WeakSet

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from client.connection.connection import Connection
from client.launch.backward_sighting import BackwardSighting
from statsd_bn.round_key import FORWARD, RoundKey

logger = logging.getLogger("statsd_bn.client")


class FirstStep:
    """Watches a connection until its first step is over, and then costs nothing.

    Args:
        connection: one to other members.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._layers: set[str] = set()
        self._stepped: WeakSet[Optimizer] = WeakSet()
        self._hook = register_optimizer_step_post_hook(self._optimizer_has_stepped)
        self._sighting = BackwardSighting(lambda: connection.ask_for_layers("a backward pass is under way"))
        connection.watch = self._see
        connection.at_end += [self._hook.remove, self._sighting.end]

    def _see(self, layer: str, key: RoundKey) -> None:
        """Takes notice of the first round."""
        # Not in the hook itself: torch goes through its hooks then.
        self._hook.remove()
        self._sighting.end()
        self._connection.watch = self._count
        self._count(layer, key)

    def _count(self, layer: str, key: RoundKey) -> None:
        if key.phase == FORWARD:
            self._layers.add(layer)
            return
        self._connection.watch = None
        count = f"{len(self._layers)} layer{' was' if len(self._layers) == 1 else 's were'}"
        logger.info("%r: %s synchronised in the first step", self._connection, count)

    def _optimizer_has_stepped(self, optimizer: Optimizer, *_: object) -> None:
        if torch.compiler.is_compiling() or not self._connection.is_own:
            return
        self._sighting.end()
        if optimizer in self._stepped:
            self._connection.ask_for_layers("the optimizer has stepped twice")
        self._stepped.add(optimizer)
