"""Fixed samples: how often a replica is named by its shift where each has samples of its own for good, and none is odd.

Looks are simulated: each replica's shifts vary from look to look around means of its own, drawn by lot. There is no
training, and only the rule of `statsd_bn.skew.shift`.
"""

import argparse

import numpy as np

from statsd_bn.skew import DIRECTIONS
from statsd_bn.skew.outliers import IN_A_ROW
from statsd_bn.skew.shift import Shift

# By how much one look differs from the next, and the means from one another.
OF_LOOKS, OF_MEANS = 0.2, (0.0, 0.03, 0.06, 0.2)
REPLICAS, LOOKS = (4, 8), 600


def main() -> None:
    """Prints how many of some groups have an alarm."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=150, help="of each kind")
    options = parser.parse_args()
    chance = np.random.default_rng(0)
    print(f"{'deviation of the means':>22} " + " ".join(f"{f'of {replicas}':>8}" for replicas in REPLICAS))
    for deviation in OF_MEANS:
        alarms = [sum(_has_alarm(chance, of, deviation) for _ in range(options.groups)) for of in REPLICAS]
        print(f"{deviation:>22} " + " ".join(f"{number:>8}" for number in alarms), flush=True)


def _has_alarm(chance: np.random.Generator, replicas: int, deviation: float) -> bool:
    shift, who, in_a_row = Shift(replicas), None, 0
    means = chance.normal(0.0, deviation, (DIRECTIONS, replicas))
    for _ in range(LOOKS):
        look = means + chance.normal(0.0, OF_LOOKS, means.shape)
        shift.add(look - look.mean(axis=1, keepdims=True))
        found = shift.outlier()
        in_a_row = in_a_row + 1 if found is not None and found == who else int(found is not None)
        who = found
        if in_a_row >= IN_A_ROW:
            return True
    return False


if __name__ == "__main__":
    main()
