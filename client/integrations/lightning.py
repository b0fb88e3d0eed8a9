"""Lightning: the plugin with which a `Trainer` synchronises a model's batch norms; a callback that logs its cost.

    Trainer(strategy="ddp", devices=4, sync_batchnorm=True, plugins=[StatsdBNLayerSync()])

A strategy calls `apply` in each process, after the process group is initialised and before DistributedDataParallel
wraps the model. It calls `revert` when `fit` ends, also by an exception, and undoes it. So each process knows its
rank here, whatever its launcher, and can connect. On a single device Lightning calls neither.
"""

import sys
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from torch import nn

from client.integrations import connect_unless_connected
from client.nn.batchnorm import SynchronizedBatchNorm
from client.nn.conversion import convert, revert
from client.session.current import current_connection
from client.session.protocol.registration import cause_of

if TYPE_CHECKING:
    from client.session.connection import Connection


# Lightning refuses a LayerSync that is not a subclass of its own one together with sync_batchnorm=True.
class StatsdBNLayerSync(TorchSyncBatchNorm):
    """Synchronises a model's batch norms through an aggregation server while `Trainer.fit` runs.

    It connects as `client.connect()` does, with the process group's rank and size for `rank` and `world_size`, and
    disconnects when the model is reverted. A process that is already connected keeps its connection. A process that is
    alone in its process group needs none.

    `fit` raises what `convert_model` and `connect` raise.
    """

    def __init__(self) -> None:
        self._connection: Connection | None = None
        self._kept: list[SynchronizedBatchNorm] = []
        self._handled: BaseException | None = None

    def apply(self, model: nn.Module) -> nn.Module:
        """Returns the model with torch's batch norms synchronised, as by `client.convert_model`, and connects."""
        self._kept = [layer for layer in model.modules() if isinstance(layer, SynchronizedBatchNorm)]
        converted = convert(model, None, stacklevel=3)
        self._handled = sys.exception()
        self._connection = connect_unless_connected()
        return converted

    def revert(self, model: nn.Module) -> nn.Module:
        """Disconnects, and returns the model with torch's layers where `apply` found them.

        If an exception ends the training the other members get it as the cause.
        """
        if self._connection:
            error = sys.exception()
            # If `fit` was called while an older exception was handled, that one is not the cause.
            self._connection.close("" if error is self._handled else cause_of(error))
            self._connection = None
        kept, self._kept = self._kept, []
        return revert(model, kept=kept, stacklevel=3)


class StatsdBNMetrics(Callback):
    """Logs `Connection.metrics()` to the trainer's loggers; a process without a connection logs nothing.

    Args:
        every_n_steps: after how many of the trainer's steps.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        self._every_n_steps = every_n_steps
        self._latest = 0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Logs after every so many steps."""
        step, connection = trainer.global_step, current_connection()
        # A step has several batches where gradients are accumulated.
        if connection is not None and step != self._latest and step % self._every_n_steps == 0:
            self._latest = step
            # Not by `log_dict`, which would log the same numbers again in each step between.
            for logger in trainer.loggers:
                logger.log_metrics(connection.metrics(), step=step)
