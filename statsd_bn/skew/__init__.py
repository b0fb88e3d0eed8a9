"""Skew: how far the members' data differ, from the rows that they bring to a forward round. Pure arithmetic.

Which rounds are looked at is decided in `statsd_bn.skew.samples`; what follows from the figures over many rounds
belongs in `server.insight`.
"""

from statsd_bn.skew.check import check_figures
from statsd_bn.skew.figures import COUNT, DIRECTIONS, FIGURES, MEAN, NUMBERS, PART, SHIFTS, VARIANCE, figures_of

__all__ = [
    "COUNT",
    "DIRECTIONS",
    "FIGURES",
    "MEAN",
    "NUMBERS",
    "PART",
    "SHIFTS",
    "VARIANCE",
    "check_figures",
    "figures_of",
]
