"""detectron2's `launch` and `DefaultTrainer`, with a model of plain batch norms: python detectron2_program.py DIR."""

import sys
from functools import partial

from zoo.libraries import library

library("torchvision")  # detectron2 imports it, and torchvision's operators may be missing

# ruff: noqa: E402
from detectron2.config import get_cfg
from detectron2.engine import DefaultTrainer, defaults, launch
from detectron2.layers import get_norm
from detectron2.modeling import META_ARCH_REGISTRY
from torch import nn

import client
from frameworks import small_training as training


@META_ARCH_REGISTRY.register()
class Network(nn.Module):
    """Builds batch norms in both of detectron2's ways: by name, and by a function."""

    def __init__(self, cfg):
        super().__init__()
        norms = iter([cfg.MODEL.RESNETS.NORM, client.SynchronizedBatchNorm2d])
        self.network = training.network(lambda channels: get_norm(next(norms), channels))

    def forward(self, batch):
        x, factors = batch
        return {"loss": training.loss(self.network(x), factors)}


class Trainer(DefaultTrainer):
    """Like the recipe in docs/frameworks.md, without detectron2's files and evaluation."""

    @classmethod
    def build_model(cls, cfg):
        return client.convert_model(super().build_model(cfg))

    @classmethod
    def build_optimizer(cls, _, model):
        return training.optimizer(model)

    @classmethod
    def build_train_loader(cls, _):
        return training.loader()

    @classmethod
    def build_lr_scheduler(cls, *_):
        return None  # detectron2's scheduler begins with a smaller rate

    def build_hooks(self):
        return []


def main(folder):
    # DefaultTrainer calls functions that assume a GPU.
    defaults.create_ddp_model = partial(defaults.create_ddp_model, device_ids=None)
    cfg = get_cfg()
    cfg.MODEL.META_ARCHITECTURE = "Network"
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.RESNETS.NORM = "BN"
    cfg.SOLVER.MAX_ITER = training.STEPS
    cfg.OUTPUT_DIR = folder
    with client.connect():
        trainer = Trainer(cfg)
        trainer.train()
    training.save(trainer.model, folder)


if __name__ == "__main__":
    launch(main, training.RANKS, dist_url="auto", args=(sys.argv[1],))
