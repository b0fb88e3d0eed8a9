"""A process of `test_lightning.py` under a Lightning `Trainer`: `lightning_program.py DIR` writes DIR/RANK.pt."""

import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import distributed
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import client
from client.integrations.lightning import StatsdBNLayerSync
from programs import lightning_training as training
from statsd_bn import StatsdBNError

# Delay of one batch on rank 0; after a second the server sends it a stack request.
LATE_SECONDS, LATE_BATCH = 4.0, 2


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = training.network()

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return training.loss(self.network, *batch)

    def train_dataloader(self) -> DataLoader:
        """Every rank's part of each whole batch, in order: Lightning's own sampler shuffles."""
        data = TensorDataset(*training.samples())
        return DataLoader(data, training.BATCH, sampler=DistributedSampler(data, shuffle=False))

    def test_dataloader(self) -> DataLoader:
        return self.train_dataloader()

    def test_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.network(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return training.optimizer(self.network)


class Failing(Module):
    """Raises MemoryError on rank 1, in the second step."""

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> torch.Tensor:
        if number and self.global_rank:
            raise MemoryError("rank 1 has no more")
        return super().training_step(batch)


class Late(Callback):
    """Delays rank 0 before one batch of each epoch, and collects this rank's log lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._handler = logging.Handler()
        self._handler.emit = lambda record: self.lines.append(record.getMessage())

    def on_train_start(self, *_: object) -> None:
        logging.getLogger("statsd_bn.client").addHandler(self._handler)

    def on_train_end(self, *_: object) -> None:
        logging.getLogger("statsd_bn.client").removeHandler(self._handler)

    def on_train_batch_start(self, trainer: Trainer, _: Module, __: object, number: int) -> None:
        if number == LATE_BATCH and trainer.global_rank == 0:
            time.sleep(LATE_SECONDS)


class Watch(Callback):
    """Records the model's layers and this process's connection during the training."""

    def on_train_start(self, _: Trainer, pl_module: Module) -> None:
        self.layers = training.names(pl_module.network)
        self.connection = repr(client.current_connection())

    def on_test_start(self, _: Trainer, pl_module: Module) -> None:
        self.tested_layers = training.names(pl_module.network)


def main(folder: Path) -> None:
    watch, module, found = Watch(), Module(), {}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer().fit(module)
    found["warnings"] = [str(warning.message) for warning in warned if "convert_model" in str(warning.message)]
    found["after one fit"] = training.state(module.network)
    late = Late()
    # With DDP's broadcast of buffers, the other rank would wait in the broadcast and not in a round.
    trainer(watch, late, strategy=DDPStrategy(broadcast_buffers=False)).fit(module)
    trainer(watch).test(module, verbose=False)
    found["after two fits"] = training.state(module.network)
    found |= {"during": watch.layers, "tested": watch.tested_layers, "after": training.names(module.network)}
    found |= {"connection during": watch.connection, "connection after": repr(client.current_connection())}
    rank = distributed.get_rank()
    found["log"] = late.lines
    found["own connection"] = with_a_connection_of_its_own(module, rank)
    found["failure"] = failure()
    torch.save(found, folder / f"{rank}.pt")


def with_a_connection_of_its_own(module: Module, rank: int) -> list[Any]:
    """Returns the connection's rounds after one more training, and whether it is closed."""
    job = os.environ["STATSD_BN_JOB"] + "-own"
    with client.connect(job=job, rank=rank, world_size=training.MEMBERS) as connection:
        trainer().fit(module)
        return [connection.rounds, connection.closed]


def failure() -> tuple[str, str, list[str]]:
    """The error of a training that fails on one rank, and the layers afterwards."""
    module = Failing()
    try:
        trainer().fit(module)
    except (MemoryError, StatsdBNError) as error:
        return type(error).__name__, str(error), training.names(module.network)
    return "", "it did not fail", []


def trainer(*callbacks: Callback, strategy: str | DDPStrategy = "ddp") -> Trainer:
    runs = {"strategy": strategy, "accelerator": "cpu", "devices": training.MEMBERS, "max_epochs": training.EPOCHS}
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
    plugins = [StatsdBNLayerSync()]
    return Trainer(**runs, **dict.fromkeys(names, False), plugins=plugins, sync_batchnorm=True, callbacks=[*callbacks])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    # Gloo's threads may abort an interpreter during its teardown (pytorch#190489), so the process skips it.
    os._exit(0)
