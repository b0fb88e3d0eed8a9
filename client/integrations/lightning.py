"""Lightning: a plugin that synchronises a model's batch norms in a `Trainer`, and a callback that logs its cost.

    Trainer(strategy="ddp", devices=4, sync_batchnorm=True, plugins=[StatsdBNLayerSync()])

A strategy calls `apply` in each process after the process group is initialised and before DistributedDataParallel wraps
the model, and `revert` when `fit` ends, also after an exception. On a single device Lightning calls neither.
"""

import sys
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from torch import nn

from client.integrations import connect_unless_connected
from client.nn.batchnorm import SynchronizedBatchNorm
from client.nn.conversion import convert_model, revert
from client.session.connection import Connection, current_connection
from client.session.protocol.registration import cause_of


# With sync_batchnorm=True Lightning refuses a LayerSync unless it is a subclass of TorchSyncBatchNorm.
class StatsdBNLayerSync(TorchSyncBatchNorm):
    """Synchronises a model's batch norms through an aggregation server while `Trainer.fit` runs.

    It calls `client.connect` with the rank and size of the process group, and disconnects when the model is reverted. A
    process that is already connected keeps its connection. A process that is alone in its process group needs none.

    `fit` raises the errors of `convert_model` and `connect`.
    """

    def __init__(self) -> None:
        self._connection: Connection | None = None
        self._synchronized_before: list[SynchronizedBatchNorm] = []
        self._handled: BaseException | None = None

    def apply(self, model: nn.Module) -> nn.Module:
        """Connects, and returns the model with synchronised batch norms, as by `client.convert_model`."""
        self._synchronized_before = [layer for layer in model.modules() if isinstance(layer, SynchronizedBatchNorm)]
        converted = convert_model(model)
        self._handled = sys.exception()
        self._connection = connect_unless_connected()
        return converted

    def revert(self, model: nn.Module) -> nn.Module:
        """Disconnects, and returns the model with its original layers.

        If an exception ends the training, the other members receive it as the cause.
        """
        if self._connection:
            error = sys.exception()
            # An exception that was being handled when `fit` was called is not the cause.
            self._connection.close("" if error is self._handled else cause_of(error))
            self._connection = None
        kept, self._synchronized_before = self._synchronized_before, []
        return revert(model, kept)


class StatsdBNMetrics(Callback):
    """Logs `Connection.metrics()` to the trainer's loggers every n steps, in a process that has a connection."""

    def __init__(self, every_n_steps: int = 50) -> None:
        self._every_n_steps = every_n_steps
        self._latest = 0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Logs after every n steps."""
        step, connection = trainer.global_step, current_connection()
        # With gradient accumulation a step has several batches.
        if connection is not None and step != self._latest and step % self._every_n_steps == 0:
            self._latest = step
            # Not `log_dict`, which would repeat the numbers in each step in between.
            for logger in trainer.loggers:
                logger.log_metrics(connection.metrics(), step=step)
