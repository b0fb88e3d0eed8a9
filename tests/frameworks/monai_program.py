"""A network of MONAI that names the layer: torchrun monai_program.py DIR."""

from pathlib import Path

from monai.networks.layers import get_norm_layer
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import client
import client.integrations.monai
from frameworks import small_training as training
from programs.ddp_programs import end_without_teardown


def main(folder: Path) -> None:
    distributed.init_process_group("gloo")
    norm = ("statsdbatch", {"momentum": 0.1})
    model = DistributedDataParallel(training.network(lambda channels: get_norm_layer(norm, 2, channels)))
    steps = training.optimizer(model)
    with client.connect():
        for x, factors in training.loader():
            steps.zero_grad()
            training.loss(model(x), factors).backward()
            steps.step()
    training.save(model, folder)


if __name__ == "__main__":
    end_without_teardown(main)
