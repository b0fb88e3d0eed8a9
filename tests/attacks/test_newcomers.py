"""A flood of connections keeps no newcomer out for long.

Before newcomers stood in line, one too many heard nothing, and tried again only after ten seconds.
"""

from contextlib import ExitStack

import pytest

from attacks.peers import Peers, Wire, handshake
from statsd_bn.messages import Status, StatusRequest

# So many come before the newcomer, of whom so many are let in each second.
BEFORE, PER_SECOND = 12, 4


@pytest.mark.parametrize("with_keys", [False], indirect=True)
def test_a_newcomer_beside_a_flood_of_connections_comes_in_in_its_turn(start):
    server = start("--max-new-connections", "1", "--connections-per-second", str(PER_SECOND))
    with ExitStack() as flood:
        for _ in range(BEFORE):
            flood.enter_context(Wire(server)).send(handshake())
        assert server.report(seconds=2.5 * BEFORE / PER_SECOND)["received"]


@pytest.mark.parametrize("with_keys", [True], indirect=True)
def test_the_connections_of_one_key_delay_those_of_no_other(start):
    server = start("--max-key-connections", "4", "--connections-per-second", "0.2")
    with Peers(server, "bob") as flood, Peers(server, "alice") as peers:
        assert isinstance(flood.open().ask(StatusRequest()), Status)
        for _ in range(200):
            flood.open().say(StatusRequest())
        assert isinstance(peers.open().ask(StatusRequest()), Status)
