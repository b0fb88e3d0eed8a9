"""The fault simulator finds nothing in the real code, finds every planted bug, and repeats to the byte."""

import math
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given

from simulation import simulate
from simulation.planted_bugs import BUGS, FOUND_LAST
from simulation.simulated_network import Clock, Network, SimulatedChannel, Weather
from simulation.simulated_rules import kind_of
from simulation.simulator import World
from statsd_bn.reduction import Rows
from statsd_bn.round_key import FORWARD
from statsd_bn.wire import encode
from support import oracle
from support.paths import ROOT
from support.strategies import any_message

QUICK_SEEDS, LONG_SEEDS = 150, 2500

# Seeds of worlds that once found a bug in the server, in the client or in a rule.
FOUND = (
    *(2008206, 5019170, 5029814, 5036649, 5056334, 5085893, 5103642, 5113026, 5170753, 5190410),
    *(5212662, 5242904, 5278108, 5302776, 5322876, 5331147, 5415926, 6003700, 6056572, 7007082, 7018732),
    *(22034463, 22169722, 22373352, 22398019, 22418538, 22418909, 22495423, 22497122, 22678855, 22748149, 25560945),
    *(26104506, 26597870, 28746350, 28834071, 29046016, 29541997, 29747795, 30403776),
)
MOST_SEEDS_FOR_A_BUG = 10_000


@pytest.mark.parametrize(
    ("first", "end"), [(0, QUICK_SEEDS), pytest.param(QUICK_SEEDS, LONG_SEEDS, marks=pytest.mark.long)]
)
def test_no_world_breaks_a_rule_although_many_events_happen(first, end):
    total = simulate.Counters()
    for counters, found in simulate.run_seeds(first, end, jobs=os.cpu_count() or 1):
        assert not found, found[0][1]
        total.add(counters)
    assert total.rounds > 1000
    assert {"dropped", "doubled", "delayed", "reordered", "server killed", "killed", "frozen"} <= set(total.faults)
    assert {"in memory", "asked where", "answered where"} <= set(total.faults)
    assert {"ReplicaLost", "RoundMismatch"} <= set(total.errors)


@pytest.mark.parametrize("seed", FOUND)
def test_bugs_found_earlier_stay_fixed(seed):
    World(seed).run()


def first_found(name: str, last: int | None) -> tuple[int, str] | None:
    """The finding of the seed that found the bug last, or else of the first seed that finds it."""
    if last is not None and (found := simulate.first_finding(simulate.run_seeds(last, last + 1, name))):
        return found
    return simulate.first_finding(simulate.run_seeds(0, MOST_SEEDS_FOR_A_BUG, name, jobs=os.cpu_count() or 1))


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name):
    found = first_found(name, FOUND_LAST.get(name))
    assert found
    seed, text = found
    assert text.startswith(f"seed {seed}, "), "a rule finds it; an exception would be a bug that is planted wrongly"
    assert simulate.first_finding(simulate.run_seeds(seed, seed + 1)) is None, "found without the bug as well"


def test_the_seeds_that_are_tried_first_are_among_the_searched_ones():
    assert all(0 <= seed < MOST_SEEDS_FOR_A_BUG for seed in FOUND_LAST.values())


def test_a_bug_that_its_seed_no_longer_finds_is_searched_for():
    elsewhere = 1  # a world without deaths
    assert simulate.first_finding(simulate.run_seeds(elsewhere, elsewhere + 1, "death-not-announced")) is None
    found = first_found("death-not-announced", elsewhere)
    assert found
    assert found[0] != elsewhere


def test_an_interrupted_run_reports_its_findings(monkeypatch, capsys):
    def run_seeds(*_):
        yield simulate.run_chunk((0, 2, ""))
        yield simulate.Counters(), [(seed, f"seed {seed}: a finding") for seed in range(2, 7)]
        assert "".join(capsys.readouterr().out.split()) == "seed2:afindingseed3:afindingseed4:afinding"
        raise KeyboardInterrupt

    monkeypatch.setattr(simulate, "run_seeds", run_seeds)
    assert simulate.main(["--seeds", "0:100"]) == 1
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("7 worlds in ")
    assert last == "interrupted"


@given(any_message)
def test_the_rules_know_the_type_of_each_frame(message):
    assert kind_of(encode(message)) == message.type


def test_a_seed_repeats_to_the_byte_whatever_the_hash_seed():
    program = (
        "import support.without_torch, sys; from simulation.simulator import World; "
        "w = World(9); w.run(); sys.stdout.write(chr(10).join(w.trace_lines()))"
    )

    def trace(hash_seed: str) -> bytes:
        path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
        environ = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}
        return subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, check=True).stdout

    with ThreadPoolExecutor() as executor:
        first, second = executor.map(trace, ("1", "2"))
    assert len(first) > 1000
    assert first == second


def test_messages_of_a_vanished_member_do_not_reach_the_next_server():
    clock, reached = Clock(), []
    network = Network(clock, random.Random(1), Weather(), [])
    network.server = SimpleNamespace(up=True, disconnected=lambda: None, receive=lambda *_: reached.append(clock.now))
    owner = SimpleNamespace(alive=True)
    SimulatedChannel(network, owner).send(b"late")
    network.vanish(owner, silently=True)
    network.server_gone()
    clock.step()
    assert not reached


def test_each_addition_of_the_oracle_is_the_exact_sum_rounded_once():
    rng = random.Random(1)
    numbers = [[(rng.random() - 0.5) * 2.0 ** rng.randint(-60, 60)] for _ in range(200)]
    total = numbers[0][0]
    for (number,) in numbers[1:]:
        total = float(Fraction(total) + Fraction(number))
    assert oracle.add_up(numbers) == [total]


def test_the_oracle_detects_another_order():
    rows = [[1e16], [1.0], [-1e16]]
    assert not oracle.is_same(oracle.add_up(rows), oracle.add_up([rows[0], rows[2], rows[1]]))


def test_the_oracle_distinguishes_signs_of_zeros_and_not_of_nans():
    assert not oracle.is_same([0.0], [-0.0])
    assert oracle.is_same([math.nan, 1.0], [-math.nan, 1.0])
    assert not oracle.is_same([math.nan, 1.0], [math.nan, 2.0])


def test_the_oracle_orders_by_member():
    late, early = (oracle.MemberRows(n, 0, Rows((1,), np.full((1, 2, 1), value))) for n, value in ((1, 1.0), (0, 1e16)))
    assert oracle.expected(FORWARD, [late, early]).values == oracle.add_up([[1e16, 1e16], [1.0, 1.0]])


def test_a_sum_far_from_the_exact_one_is_found():
    assert oracle.is_near_the_exact_sum([[1.0], [2.0]], [3.0])
    assert not oracle.is_near_the_exact_sum([[1.0], [2.0]], [3.0 + 1e-9])
