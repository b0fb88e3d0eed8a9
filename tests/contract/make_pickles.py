"""Writes `pickles/`. It ran once, at 62e93b8; all later versions must load its files.

    PYTHONPATH=tests python tests/contract/make_pickles.py

Add further models to the files by hand: this script would rewrite the models of that commit.
"""

import gzip
import io
import pickle
from pathlib import Path
from typing import Any

import torch

from support.contract_pickles import MODELS, evaluated, is_lazy, trained

FOLDER = Path(__file__).with_name("pickles")

PROTOCOL = 4


def main() -> None:
    """Writes the models, their states, and what each computes."""
    models, states, expected = {}, {}, {}
    for seed, (name, kept) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        model = kept.model()
        x, factors = kept.tensors()
        if not is_lazy(model):
            trained(model, x * 2 - 1, factors)  # so that every tensor differs from a new layer's
            for number, parameter in enumerate(model.parameters()):
                parameter.grad = None
                parameter.data += (torch.arange(parameter.numel()) + number).view_as(parameter).sin() / 4
            states[name] = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        models[name] = {
            "pickle": pickle.dumps(model, PROTOCOL),
            "torch": saved_by_torch(model, pickle_protocol=PROTOCOL),
        }
        expected[name] = {
            "eval": evaluated(pickle.loads(models[name]["pickle"]), x),  # noqa: S301 - written above
            "step": trained(model.train(), x, factors),
        }
    write("models.pickle", pickle.dumps(models, PROTOCOL))
    # In the protocol that torch uses: its safe loader warns about others.
    write("states.pt", saved_by_torch(states))
    write("expected.pt", saved_by_torch(expected))


def saved_by_torch(value: Any, **options: Any) -> bytes:
    """What `torch.save` writes."""
    saved = io.BytesIO()
    torch.save(value, saved, **options)
    return saved.getvalue()


def write(name: str, content: bytes) -> None:
    """Writes a compressed file; torch's are mostly padding."""
    (FOLDER / f"{name}.gz").write_bytes(gzip.compress(content, mtime=0))


if __name__ == "__main__":
    main()
