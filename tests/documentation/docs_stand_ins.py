"""Names that a Python block of the documentation may use without defining them, since the reader's script has them.

| name | what it is |
|---|---|
| `torch`, `nn`, `client` | the modules |
| `rank`, `epochs` | this process's number; 2 |
| `model` | an image classifier with two batch norms, synchronised where the block does not do that itself |
| `optimizer`, `criterion` | SGD, and a loss |
| `images`, `labels`, `loader` | a batch of 8 images, and 3 such batches |
| `micro_batches` | the batch in 4 pieces |
| `train_loop`, `accuracy` | an object with a `train_loader` and no other loaders, and a number |
| `train` | a function that raises the `ReplicaLost` in `lost`, for pages about errors |
| `Module`, `module` | a LightningModule with this model, loss and data, in a block with a `Trainer` |
| `model`, `dataset` | a model that returns its loss, and its images and labels, in a block with `transformers` |
| `horovod.torch` | where Horovod is not installed, `rank`, `size` and an optimizer that reduces nothing |
"""

import importlib.util
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import client
from statsd_bn.errors import ReplicaLost

rank = int(os.environ["RANK"])
epochs = 2

torch.set_num_threads(1)
torch.manual_seed(rank)
images = torch.randn(8, 3, 6, 6)
labels = torch.randint(10, (8,))
loader = DataLoader(TensorDataset(images.repeat(3, 1, 1, 1), labels.repeat(3)), batch_size=8)
micro_batches = list(zip(images.chunk(4), labels.chunk(4), strict=True))
train_loop = SimpleNamespace(train_loader=loader, validation_loader=None, test_loader=None)
accuracy = 0.5

model = nn.Sequential(
    nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)
)
if not torch.cuda.is_available():
    model.cuda = lambda: model  # the page's readers have a GPU
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

lost = ReplicaLost("rank 1 was lost", member=1, step=4, cause="the connection was lost")


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = model

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": criterion(self.network(images), labels)}


def train(_: nn.Module) -> None:
    raise lost


def names(text: str) -> dict[str, Any]:
    given = {name: value for name, value in globals().items() if not name.startswith("_")}
    if "transformers" in text:
        given |= {"model": WithLoss(), "dataset": [{"images": images[0], "labels": labels[0]}] * 6}
    elif "lightning" in text:
        from documentation.docs_lightning import Module  # noqa: PLC0415 - it loads Lightning, which takes seconds

        given |= {"Module": Module, "module": Module()}
    elif "horovod" in text and importlib.util.find_spec("horovod") is None:
        _stand_in_for_horovod()
    elif "convert_model" not in text:
        client.convert_model(model)
    return given


def _stand_in_for_horovod() -> None:
    package, module = ModuleType("horovod"), ModuleType("horovod.torch")
    package.torch = module
    module.init = lambda: None
    module.rank = lambda: rank
    module.size = lambda: int(os.environ["WORLD_SIZE"])
    module.DistributedOptimizer = lambda optimizer, **_: optimizer
    sys.modules |= {"horovod": package, "horovod.torch": module}
