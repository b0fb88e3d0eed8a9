"""All transports give the same bits, whatever is done with a layer."""

import pytest

from programs import transport_programs
from support.transports import CHOSEN, HOST_TRANSPORTS, TRANSPORTS, WATCHED

RANKS = len(transport_programs.SIZES)


@pytest.mark.parametrize(
    ("transports", "program"),
    [
        pytest.param(
            (*HOST_TRANSPORTS, WATCHED), transport_programs.every_kind_of_call, id="over the host, the fastest kernels"
        ),
        pytest.param(
            (*TRANSPORTS, CHOSEN),
            transport_programs.by_reference,
            id="over the host and on devices, reference kernels",
            marks=pytest.mark.long,
        ),
    ],
)
def test_every_kind_of_call_gives_the_same_bits_over_all_transports(over, transports, program):
    first, *others = (over(transport, RANKS, program) for transport in transports)
    assert len(others) == len(transports) - 1 > 1
    for rank in range(RANKS):
        for name, values in first[rank].items():
            for transport, other in zip(transports[1:], others, strict=True):
                assert other[rank][name].tobytes() == values.tobytes(), (rank, name, transport)
