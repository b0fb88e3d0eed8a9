"""Programs of the contract's training tests: ranks of a gloo group, through the public interface only."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import client

SECONDS = 100.0

Values = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """Where the ranks of a job connect: a server that the test has started, and a name that no other test uses."""

    endpoint: str
    name: str

    def connect(self) -> client.Connection:
        return client.connect(self.endpoint, job=self.name, round_timeout=SECONDS)


def perhaps(job: Job | None) -> AbstractContextManager[client.Connection | None]:
    """A connection, or none: then the layers use torch's process group."""
    return job.connect() if job else nullcontext()


def loop(samples: int = 12) -> Any:
    return SimpleNamespace(
        train_loader=DataLoader(range(samples), batch_size=2, shuffle=True),
        validation_loader=DataLoader(range(6), batch_size=3),
        test_loader=None,
    )


def split_loaders(_rank: Any, job: Job | None) -> Values:
    """This rank's samples from each loader; from the training loader for the epochs 0, 1 and 0 again."""
    training = loop()
    with perhaps(job):
        handler = client.DDPHandler(training)
        handler.add_distributed_samplers()
        epochs = []
        for epoch in (0, 1, 0):
            handler.set_epoch(epoch)
            epochs.append(torch.cat(list(training.train_loader)).tolist())
    validation = [batch.tolist() for batch in training.validation_loader]
    return {"epochs": epochs, "validation": validation, "test": training.test_loader}


def synchronise_measurements(rank: Any, job: Job | None) -> Values:
    """What `mp_sync` and `mp_sync_dict` return for values of each kind; lengths differ between the ranks."""
    mine = rank.rank
    with perhaps(job):
        handler = client.DDPHandler(loop())
        sync = handler.mp_sync
        return {
            "tensor": sync(torch.full((1 + mine, 2), mine, dtype=torch.bfloat16)),
            "number": sync(mine + 0.5),
            "integers": sync([mine] * (2 - mine)),
            "array": sync(np.array([mine], np.float32), return_tensor=False),
            "doubles": sync([0.1], double_precision=True),
            "by rank": [part.tolist() for part in sync([mine] * (1 + mine), concat_mp_data=False)],
            "list": sync([mine], return_tensor=False),
            "dict": handler.mp_sync_dict({"loss": mine + 0.5, "labels": [mine] * (1 + mine)}),
        }


def fail_to_synchronise(rank: Any, job: Job | None) -> Values:
    """The errors of mismatched values, and a value synchronised after each."""
    mine = rank.rank
    with perhaps(job):
        handler = client.DDPHandler(loop())
        calls: dict[str, Callable[[], Any]] = {
            "text on rank 1": lambda: handler.mp_sync("text" if mine else 1.0),
            "other dtypes": lambda: handler.mp_sync(1 if mine else 1.0),
            "other keys": lambda: handler.mp_sync_dict({"loss" if mine else "accuracy": 1.0}),
        }
        return {name: (_error(call), handler.mp_sync(mine).tolist()) for name, call in calls.items()}


def _error(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the test says which one it has to be
        return type(error).__name__, str(error)
    return "", "no error"
