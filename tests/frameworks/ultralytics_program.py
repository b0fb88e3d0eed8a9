"""Ultralytics' `YOLO.train` with the recipe's callbacks on gloo, without validation: ultralytics_program.py DIR."""

import os
from copy import deepcopy
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import distributed, nn
from ultralytics import YOLO
from ultralytics.models.yolo.detect import DetectionTrainer
from ultralytics.utils.torch_utils import unwrap_model

import client
from programs.ddp_programs import end_without_teardown
from zoo.libraries import library

RANKS = 2
IMAGES = 8
EPOCHS = 3
MAX_NORM = 10.0  # the trainer clips the gradients' norm to it
PLAIN = {"mosaic", "hsv_h", "hsv_s", "hsv_v", "translate", "scale", "fliplr", "erasing", "warmup_epochs"}


class Parallel(nn.parallel.DistributedDataParallel):
    """Leaves out the list of GPUs, which torch refuses for a model on the CPU."""

    def __init__(self, module, device_ids=None, **options):  # noqa: ARG002
        super().__init__(module, **options)


class OnTheCPU(DetectionTrainer):
    """Records its steps' inputs, and the running statistics after the first step."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.world_size = RANKS
        self.batches = []
        self.first = None

    def _setup_ddp(self):
        distributed.init_process_group("gloo")
        nn.parallel.DistributedDataParallel = Parallel

    def preprocess_batch(self, batch):
        batch = super().preprocess_batch(batch)
        self.batches.append({name: batch[name].clone() for name in ("img", "cls", "bboxes", "batch_idx")})
        return batch

    def validate(self):
        return {}, 0.0

    def final_eval(self):
        pass


def synchronise(trainer):
    if trainer.world_size > 1:
        client.convert_model(trainer.model)
        client.connect()


def leave(_):
    client.disconnect()


def keep_the_beginning(trainer):
    trainer.beginning = deepcopy(unwrap_model(trainer.model))


def keep_the_first_step(trainer):
    if trainer.first is None:
        trainer.first = statistics(unwrap_model(trainer.model))


def statistics(model):
    return {name: value.clone() for name, value in model.named_buffers() if "running" in name}


def train_on_the_whole_batch(trainer, steps):
    """The plain model's statistics after the first step and its state after the last, in one process.

    A rank's loss is divided by the weight of the labels in its share, and multiplied by the number of ranks before
    DistributedDataParallel averages the gradients. This process gets the same gradients from the sum of the shares'
    losses.
    """
    model, options = trainer.beginning.train(), trainer.args
    optimizer = trainer.build_optimizer(model, options.optimizer, options.lr0, options.momentum, options.weight_decay)
    after = []
    for shares in steps:
        predictions = in_shares(model(torch.cat([share["img"] for share in shares])))
        sum(model.loss(*both)[0].sum() for both in zip(shares, predictions, strict=True)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        after.append(statistics(model))
    return {"first": after[0], "last": model.state_dict()}


def in_shares(predictions):
    """Splits all tensors in a structure along their first dimension, for each rank."""
    if isinstance(predictions, torch.Tensor):
        return predictions.chunk(RANKS)
    if isinstance(predictions, dict):
        parts = zip(*map(in_shares, predictions.values()), strict=True)
        return [dict(zip(predictions, part, strict=True)) for part in parts]
    return [list(part) for part in zip(*map(in_shares, predictions), strict=True)]


def make_images(folder):
    """A tiny data set of images with different colours."""
    generator = np.random.default_rng(0)
    (folder / "images").mkdir(parents=True)
    (folder / "labels").mkdir()
    for number in range(IMAGES):
        pixels = generator.integers(20 * number, 20 * number + 100, (64, 64, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{number}.png")
        (folder / "labels" / f"{number}.txt").write_text("0 0.5 0.5 0.4 0.4\n")
    (folder / "data.yaml").write_text(f"path: {folder}\ntrain: images\nval: images\nnames: {{0: thing}}\n")


def main(folder: Path) -> None:
    library("torchvision")  # the trainer imports it, and torchvision's operators may be missing
    rank = int(os.environ["RANK"])
    data = folder / f"data{rank}"
    make_images(data)
    model = YOLO("yolo11n.yaml")
    model.add_callback("on_pretrain_routine_end", keep_the_beginning)
    if "UNSYNCHRONISED" not in os.environ:
        model.add_callback("on_pretrain_routine_end", synchronise)
        model.add_callback("on_train_end", leave)
    model.add_callback("on_train_batch_end", keep_the_first_step)
    options = {
        "batch": IMAGES,
        "nbs": IMAGES,
        "imgsz": 64,
        "epochs": EPOCHS,
        "optimizer": "SGD",
        "lrf": 1.0,  # a constant rate
        "amp": False,
        "plots": False,
        "val": False,
    }
    options |= dict.fromkeys(PLAIN, 0.0)
    where = {"data": str(data / "data.yaml"), "project": str(folder / "runs"), "name": "run", "exist_ok": True}
    model.train(trainer=OnTheCPU, device="cpu", **where, **options)

    trainer = model.trainer
    steps = [[{} for _ in range(RANKS)] for _ in trainer.batches]
    for shares, batch in zip(steps, trainer.batches, strict=True):
        distributed.all_gather_object(shares, batch)
    found = {
        "beginning": {name: value.clone() for name, value in trainer.beginning.state_dict().items()},
        "first": trainer.first,
        "last": unwrap_model(trainer.model).state_dict(),
        "whole": train_on_the_whole_batch(trainer, steps),
        "layers": {type(part).__name__ for part in unwrap_model(trainer.model).modules()},
    }
    if rank == 0:
        saved = torch.load(trainer.last, weights_only=False)["ema"]
        found["saved"] = {f"{type(part).__module__}.{type(part).__name__}" for part in saved.modules()}
    torch.save(found, folder / f"{rank}.pt")
    distributed.barrier()


if __name__ == "__main__":
    end_without_teardown(main)
