"""All lanes give the same bits, whatever is done with a layer."""

from programs import lane_programs
from support.lanes import LANES

RANKS = len(lane_programs.SIZES)


def test_every_kind_of_call_gives_the_same_bits_over_all_lanes(over):
    first, *others = (over(lane, RANKS, lane_programs.every_kind_of_call) for lane in LANES)
    assert len(others) == len(LANES) - 1 > 1
    for rank in range(RANKS):
        for name, values in first[rank].items():
            for other in others:
                assert other[rank][name].tobytes() == values.tobytes(), (rank, name)
