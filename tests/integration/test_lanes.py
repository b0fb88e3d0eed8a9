"""All lanes give the same bits, whatever is done with a layer."""

import pytest

from programs import lane_programs
from support.lanes import HOST_LANES, LANES

RANKS = len(lane_programs.SIZES)


@pytest.mark.parametrize(
    ("lanes", "program"),
    [
        pytest.param(HOST_LANES, lane_programs.every_kind_of_call, id="over the host, the CPU's kernels"),
        pytest.param(
            LANES,
            lane_programs.elementwise,
            id="over the host and on devices, elementwise kernels",
            marks=pytest.mark.long,
        ),
    ],
)
def test_every_kind_of_call_gives_the_same_bits_over_all_lanes(over, lanes, program):
    first, *others = (over(lane, RANKS, program) for lane in lanes)
    assert len(others) == len(lanes) - 1 > 1
    for rank in range(RANKS):
        for name, values in first[rank].items():
            for lane, other in zip(lanes[1:], others, strict=True):
                assert other[rank][name].tobytes() == values.tobytes(), (rank, name, lane)
