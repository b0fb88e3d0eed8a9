"""Trains on the digits with Hugging Face Accelerate, on the CPU: a script to start from.

torchrun --nproc-per-node 2 examples/train_accelerate.py

Two lines make its batch norm synchronised, as in any script: `client.convert_model` before `prepare`, which wraps the
model in DistributedDataParallel, and `client.connect` around the training.
"""

import argparse
import os
import sys
import traceback
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import client
import digits

LEARNING_RATE = 0.05


def main() -> None:
    """Trains; rank 0 prints the loss and saves the model."""
    options = arguments()
    torch.set_num_threads(1)
    # With split_batches each process gets its part of a batch of the loader.
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
    model = client.convert_model(digits.network())
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model, optimizer, loader = accelerator.prepare(model, optimizer, batches())
    with client.connect():
        for step, (pixels, labels) in zip(range(1, options.steps + 1), loader, strict=False):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(pixels), labels)
            accelerator.backward(loss)
            optimizer.step()
            accelerator.print(f"step {step}: loss {loss.item():.3f}", flush=True)
    if options.save:
        trained = client.revert_model(accelerator.unwrap_model(model))
        accelerator.save(trained.state_dict(), options.save)
    accelerator.wait_for_everyone()


def batches() -> DataLoader[tuple[torch.Tensor, ...]]:
    """Returns the whole batches of one epoch; the images are shuffled already."""
    images, _ = digits.load()
    return DataLoader(TensorDataset(images.pixels, images.labels), digits.BATCH, drop_last=True)


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Trains on the digits with Accelerate.")
    parser.add_argument("--steps", type=int, default=179, help="batches to train with (default: 179, one epoch)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="save weights and running statistics here")
    return parser.parse_args()


if __name__ == "__main__":
    code = 0
    try:
        main()
    except Exception:  # noqa: BLE001 - printed; the interpreter must not be torn down
        traceback.print_exc()
        code = 1
    # As in train_digits.py: a late thread of gloo may abort an interpreter during its teardown (pytorch#190489).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
