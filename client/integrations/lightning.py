"""Lightning: the plugin that a `Trainer` calls to synchronise a model's batch norms, and to undo it.

    Trainer(strategy="ddp", devices=4, sync_batchnorm=True, plugins=[StatsdBNLayerSync()])

A strategy calls `apply` in each process, after the process group has begun and before DistributedDataParallel takes the
model, and `revert` when `fit` ends, also by an exception. So this is where a process knows its number, whoever has
launched it, and where its connection belongs. On a single device Lightning calls neither.
"""

import sys
from typing import TYPE_CHECKING

from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from torch import distributed, nn

from client.connection.current import current_connection
from client.connection.registration import cause_of
from client.launch.connect import connect
from client.layers.batchnorm import SynchronizedBatchNorm
from client.layers.convert import convert, revert

if TYPE_CHECKING:
    from client.connection.connection import Connection


# A LayerSync that is not derived from Lightning's own one is refused beside sync_batchnorm=True.
class StatsdBNLayerSync(TorchSyncBatchNorm):
    """Synchronises a model's batch norms through an aggregation server while `Trainer.fit` runs.

    It connects as `client.connect()` does, with the process group's rank and size for `rank` and `world_size`, and
    disconnects when the model is reverted. A process that is connected already keeps its connection, and one that is
    alone in its process group needs none.

    `fit` raises what `convert_model` and `connect` raise.
    """

    def __init__(self) -> None:
        self._connection: Connection | None = None
        self._kept: list[SynchronizedBatchNorm] = []
        self._handled: BaseException | None = None

    def apply(self, model: nn.Module) -> nn.Module:
        """Returns the model with torch's batch norms replaced, as `client.convert_model`, and connects."""
        self._kept = [layer for layer in model.modules() if isinstance(layer, SynchronizedBatchNorm)]
        converted = convert(model, None, stacklevel=3)
        if _needs_a_connection():
            self._handled = sys.exception()
            self._connection = connect(rank=distributed.get_rank(), world_size=distributed.get_world_size())
        return converted

    def revert(self, model: nn.Module) -> nn.Module:
        """Disconnects, and returns the model with torch's layers where `apply` found them.

        If an exception ends the training, the other members are told of it.
        """
        if self._connection:
            error = sys.exception()
            # A training that is run while an older exception is handled does not fail of that one.
            self._connection.close("" if error is self._handled else cause_of(error))
            self._connection = None
        kept, self._kept = self._kept, []
        return revert(model, kept=kept, stacklevel=3)


def _needs_a_connection() -> bool:
    connection = current_connection()
    if connection and connection.is_own:
        return False
    return distributed.is_initialized() and distributed.get_world_size() > 1
