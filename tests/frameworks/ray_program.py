"""Ray Train: python ray_program.py DIR."""

import sys

import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

import client
from frameworks import small_training as training


def train_loop(config):
    model = prepare_model(client.convert_model(training.network()))
    steps = training.optimizer(model)
    with client.connect():
        for x, factors in training.loader():
            steps.zero_grad()
            training.loss(model(x), factors).backward()
            steps.step()
    training.save(model, config["folder"])


if __name__ == "__main__":
    ray.init(num_cpus=training.RANKS + 1, include_dashboard=False, log_to_driver=True)
    scaling = ScalingConfig(num_workers=training.RANKS, use_gpu=False)
    TorchTrainer(train_loop, train_loop_config={"folder": sys.argv[1]}, scaling_config=scaling).fit()
    ray.shutdown()
