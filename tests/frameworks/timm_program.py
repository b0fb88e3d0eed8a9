"""The steps of timm's `train.py --sync-bn`, with timm's layers and optimizer: torchrun timm_program.py DIR."""

from pathlib import Path

from torch import distributed
from torch.nn.parallel import DistributedDataParallel

# The recipe imports `convert_model` under the name that train.py calls.
from client import connect
from client import convert_model as convert_sync_batchnorm
from frameworks import small_training as training
from programs.ddp_programs import end_without_teardown
from zoo.libraries import library

# Imported by `library`, since timm imports torchvision, whose operators may be missing.
layers, optim = library("timm.layers"), library("timm.optim")


def main(folder: Path) -> None:
    distributed.init_process_group("gloo")
    model = training.network(lambda channels: layers.BatchNormAct2d(channels, apply_act=False))
    model = convert_sync_batchnorm(model)
    # "momentum" is SGD without Nesterov's correction, unlike timm's "sgd".
    steps = optim.create_optimizer_v2(model, opt="momentum", lr=training.LEARNING_RATE, momentum=0.9, weight_decay=0.0)
    parallel = DistributedDataParallel(model)
    for x, factors in training.loader():
        steps.zero_grad()
        training.loss(parallel(x), factors).backward()
        steps.step()
    training.save(parallel, folder)


def connected(folder: Path) -> None:
    with connect():
        main(folder)


if __name__ == "__main__":
    end_without_teardown(connected)
