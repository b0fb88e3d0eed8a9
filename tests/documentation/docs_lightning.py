"""The LightningModule that a block of the documentation may use, see `docs_stand_ins.py`."""

import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from documentation import docs_stand_ins as given


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = given.model

    def train_dataloader(self) -> DataLoader:
        return given.loader

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return given.criterion(self.network(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return given.optimizer
