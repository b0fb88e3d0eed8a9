"""torchvision's training script, made repeatable, with the recipe or PLAIN: torchvision_program.py DIR BATCH."""

import importlib.util
import os
import runpy
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import distributed, nn

from programs.ddp_programs import end_without_teardown
from zoo.libraries import library

torchvision = library("torchvision")  # works without operators, which may not fit this torch

CLASSES = 8  # the script computes the top-5 accuracy
IMAGES = 2  # of each class
RECIPE = {
    "import torch\n": "import client\nimport torch\n",
    "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)": "client.convert_model(model)",
    "\n    main(args)\n": "\n    with client.connect():\n        main(args)\n",
}
OPTIONS = ["--device=cpu", "--model=resnet18", "--epochs=2", "--workers=0", "--lr=0.01", "--print-freq=1"]
SIZES = ["--train-crop-size=64", "--val-resize-size=64", "--val-crop-size=64"]

models: list["Parallel"] = []


class Parallel(nn.parallel.DistributedDataParallel):
    """Leaves out the list of GPUs, which torch refuses for a model on the CPU, and keeps each step's statistics.

    In the script's evaluation after each epoch the wrapper gives all ranks rank 0's statistics, so the statistics at
    the end would not show a difference.
    """

    def __init__(self, module, device_ids=None):  # noqa: ARG002
        super().__init__(module)
        self.steps = []
        models.append(self)

    def forward(self, *args):
        output = super().forward(*args)
        if self.training:
            buffers = self.module.named_buffers()
            self.steps.append({name: value.clone() for name, value in buffers if "running" in name})
        return output


class Repeatable(torchvision.datasets.ImageFolder):
    """Augments an image in the same way on each rank, and returns it in float64."""

    def __getitem__(self, index):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(index)
            image, label = super().__getitem__(index)
        return image.double(), label


def run_on_the_cpu() -> None:
    """Replaces the GPU by the CPU where the script uses a GPU whatever its options are."""
    initialise, tensor = distributed.init_process_group, torch.tensor
    torch.cuda.set_device = lambda _: None
    distributed.init_process_group = lambda backend, **options: initialise("gloo", **options)  # noqa: ARG005
    torch.tensor = lambda data, device=None, **options: tensor(data, **options)  # noqa: ARG005
    nn.parallel.DistributedDataParallel = Parallel


def make_repeatable() -> None:
    """The same weights, images and augmentations, in float64, however many ranks there are."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    torchvision.datasets.ImageFolder = Repeatable


def make_images(folder: Path) -> None:
    """A tiny data set of images with different colours."""
    generator = np.random.default_rng(0)
    for part in ("train", "val"):
        for number in range(CLASSES * IMAGES):
            directory = folder / part / f"class{number // IMAGES}"
            directory.mkdir(parents=True, exist_ok=True)
            pixels = generator.integers(4 * number, 4 * number + 100, (64, 64, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(directory / f"{number}.png")


def with_the_recipe(source: str) -> str:
    for old, new in RECIPE.items():
        assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in train.py"
        source = source.replace(old, new)
    return source


def main(folder: Path) -> None:
    rank, is_plain = os.environ["RANK"], "PLAIN" in os.environ
    source = (Path(importlib.util.find_spec("presets").origin).parent / "train.py").read_text()
    script = folder / f"train{rank}.py"
    script.write_text(source if is_plain else with_the_recipe(source))
    make_images(folder / rank)
    run_on_the_cpu()
    make_repeatable()
    where = [f"--data-path={folder / rank}", f"--output-dir={folder}", f"--batch-size={sys.argv[2]}"]
    sys.argv = [str(script), *where, *OPTIONS, *SIZES, *([] if is_plain else ["--sync-bn"])]
    runpy.run_path(str(script), run_name="__main__")
    (model,) = models
    torch.save({"state": model.module.state_dict(), "steps": model.steps}, folder / f"{rank}.pt")
    distributed.barrier()


if __name__ == "__main__":
    end_without_teardown(main)
