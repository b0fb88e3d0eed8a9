"""Trains on the whole batch, and compares that with the replicas' saved result; prints the comparison as JSON."""

import argparse
import hashlib
import json
from pathlib import Path

import torch

import digits
import report
import ways


def main() -> None:
    """Prints the comparison, with the demo's measures and tolerance."""
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
    """Returns a hash of the bits of all weights and statistics."""
    found = hashlib.sha256()
    for name in sorted(state):
        found.update(name.encode() + state[name].contiguous().numpy().tobytes())
    return found.hexdigest()


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("saved", type=Path, help="file that `train_digits.py --save --keep STEP` wrote")
    return parser.parse_args()


if __name__ == "__main__":
    main()
