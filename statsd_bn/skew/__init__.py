"""Skew: how far the members' data differ, from the rows that they bring to a forward round. Pure arithmetic.

`samples` decides which rounds are looked at, `figures` tells what they were like, and `comparison` what follows from
that over many rounds. The server does all of it for members that it knows, and the members do it themselves where there
is no server. What is done about a finding does not belong here.
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
