"""Compares what the replicas saved with training on the whole batch, which it does itself; prints it as JSON."""

import argparse
import hashlib
import json
from pathlib import Path

import torch

import digits
import report
import ways


def main() -> None:
    """Prints what came of a training, with the demo's own measures and tolerance."""
    options = arguments()
    saved = torch.load(options.saved, weights_only=True)
    states = saved.pop("states")
    length = ways.Length(max(states), min(states))
    trained = ways.Trained(states[length.compare], states[length.steps], **saved)
    whole = ways.whole_batch(length, lambda _: None)
    row = report.results({report.WHOLE_BATCH: whole, report.SYNCHRONISED: trained})[report.SYNCHRONISED]
    found = {
        "compared_after": length.compare,
        "difference": row.largest_difference,
        "equals_whole_batch": row.equals_whole_batch,
        "accuracy": row.accuracy,
        "rounds": row.rounds,
        "bits": bits(trained.final),
    }
    print(json.dumps(found))


def bits(state: digits.State) -> str:
    """Returns what only the same bits in all weights and statistics have in common."""
    found = hashlib.sha256()
    for name in sorted(state):
        found.update(name.encode() + state[name].contiguous().numpy().tobytes())
    return found.hexdigest()


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("saved", type=Path, help="what `train_digits.py --save` wrote, with a step to --keep")
    return parser.parse_args()


if __name__ == "__main__":
    main()
