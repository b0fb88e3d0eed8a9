"""Trains on the digits while processes leave and join.

python -m server &
export WORLD_SIZE=3
for rank in 0 1 2; do RANK=$rank python examples/train_elastic.py & done

Kill a process, and the others continue from the last commit; start another one (RANK=3), and it receives the state and
a share of the data. No sample of an epoch is lost or repeated, and no process group is needed.
"""

import argparse
from pathlib import Path

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import client
import digits
from training import LEARNING_RATE, snapshot

BATCH = 16
COMMIT_EVERY = 5


def main() -> None:
    """Trains, prints the progress, and saves the model."""
    options = arguments()
    torch.set_num_threads(1)
    images, _ = digits.load()
    dataset = TensorDataset(images.pixels, images.labels)
    model = client.convert_model(digits.network())
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def train(state: client.ElasticState) -> None:
        """Trains from the state: from the start, after a change within an epoch, or as a newcomer."""
        loader = DataLoader(dataset, BATCH, sampler=state.sampler)
        while state.epoch < options.epochs:
            state.sampler.set_epoch(state.epoch)
            for index, (pixels, labels) in enumerate(loader):
                optimizer.zero_grad()
                functional.cross_entropy(model(pixels), labels, reduction="sum").backward()
                client.average_gradients(model, len(labels))
                optimizer.step()
                state.sampler.record_batch(index, BATCH)
                if index % COMMIT_EVERY == COMMIT_EVERY - 1:
                    state.commit()
                    print(f"epoch {state.epoch}, batch {index + 1} of {len(loader)}", flush=True)
            state.commit()
            state.epoch += 1

    with client.connect(policy="elastic", round_timeout=options.deadline):
        state = client.ElasticState(model, optimizer, client.ElasticSampler(dataset), epoch=0)
        client.run_elastic(train, state)
    if options.save:
        torch.save(snapshot(model), options.save)


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Trains on the digits as process RANK, while others leave and join.")
    parser.add_argument("--epochs", type=int, default=5, help="(default: 5)")
    parser.add_argument(
        "--deadline", type=float, default=60.0, metavar="SECONDS", help="how long to wait for others (default: 60)"
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="save weights and running statistics here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
