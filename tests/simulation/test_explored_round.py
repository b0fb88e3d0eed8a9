"""The round in C: no order of its steps breaks a rule, and each slip that is planted into it is found."""

import os
import subprocess
from pathlib import Path

import pytest

from client.native.build import NO_COMPILER
from simulation.explored_round import CLOSES, COMPILER, ESCALATES, KILLS, OTHER_KEY, SMALL, explored, program

pytestmark = pytest.mark.skipif(not COMPILER or os.name != "posix", reason=NO_COMPILER)

EVERYTHING = OTHER_KEY | CLOSES | ESCALATES

SET = "static void set(_Atomic uint64_t *word, uint64_t value) { atomic_store_explicit(word, value, memory_order_%s); }"
LOAD = "return atomic_load_explicit(word, memory_order_%s);"
STRICT, RELAXED = "seq_cst", "relaxed"

# Original text, replacement, and arguments of the exploration that finds the slip: ranks, rounds, events.
SLIPS = {
    "relaxed stores": (SET % STRICT, SET % RELAXED, (2, 1, 0)),
    "stores that later loads overtake": (SET % STRICT, SET % "release", (2, 1, 0)),
    "relaxed loads": (LOAD % STRICT, LOAD % RELAXED, (2, 1, 0)),
    "one slot": ("(g->turn & 1)", "0", (2, 2, 0)),
    "arrival before the rows": (
        "  write_rows(g, counts, values, replicas);\n  set(&place_of(g, g->me)->arrival, g->turn);\n",
        "  set(&place_of(g, g->me)->arrival, g->turn);\n  write_rows(g, counts, values, replicas);\n",
        (2, 1, 0),
    ),
    "reader overtaken": ("arrival) < g->turn) return 0;", "arrival) + 1 < g->turn) return 0;", (2, 2, 0)),
    "no wake-up after the last arrival": ("    wake_all(g);\n    return add_up", "    return add_up", (2, 1, 0)),
    "a wake-up that keeps the futex word": ("word, 1, memory_order", "word, 0, memory_order", (2, 1, 0)),
    "no mark before sleep": ("    set(asleep, 1);\n", "", (2, 1, 0)),
    "no check before sleep": ("    found = state_of(g);\n    int", "    int", (2, 1, 0)),
    "keys not compared": ("its.digest != g->digest || ", "", (2, 2, OTHER_KEY)),
    "only the first row added": ("        for (int64_t k = 0; k < size; k++) total[k] += rows[k];", ";", (2, 1, 0)),
    "own time of arrival lost": ("values, replicas);\n  set", "values, replicas);\n  g->came = 0;\n  set", (2, 2, 0)),
    "no wake-up after a close": ("  set(closed, reason);\n  wake_all(g);", "  set(closed, reason);", (2, 1, CLOSES)),
    "no second check of the arrivals": (
        "return have_all_arrived(g) ? SBN_DONE : SBN_CLOSED;",
        "return SBN_CLOSED;",
        (3, 2, CLOSES),
    ),
    "escalation of a later turn missed": ("escalated) >= g->turn)", "escalated) == g->turn)", (2, 2, ESCALATES)),
    "no escalation": (
        "void sbn_escalate(sbn_group *g) { set",
        "void sbn_escalate(sbn_group *g) { if (0) set",
        (2, 1, ESCALATES),
    ),
}


@pytest.fixture(scope="module")
def explore(tmp_path_factory) -> Path:
    return program(tmp_path_factory.mktemp("explore"), "explore", changed=(SMALL,))


@pytest.mark.parametrize(
    ("ranks", "rounds", "what"),
    [
        (2, 2, KILLS),
        (2, 3, EVERYTHING),
        (2, 3, 0),
        (3, 1, 0),
        pytest.param(3, 2, 0, marks=pytest.mark.long),
        pytest.param(3, 2, CLOSES, marks=pytest.mark.long),
    ],
)
def test_no_order_of_the_steps_breaks_a_rule(explore, ranks, rounds, what):
    assert explored(explore, ranks, rounds, what).endswith(" states")


@pytest.mark.parametrize("slip", SLIPS)
def test_a_planted_slip_is_found(tmp_path, slip):
    before, after, (ranks, rounds, what) = SLIPS[slip]
    path = program(tmp_path, "explore", "-O0", changed=(SMALL, (before, after)))
    assert explored(path, ranks, rounds, what).startswith("found: ")


def sanitized(folder: Path, *changed: tuple[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        path = program(folder, "ranks", "-fsanitize=thread", changed=changed)
    except subprocess.CalledProcessError:
        pytest.skip("the compiler has no ThreadSanitizer")
    environ = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    return subprocess.run([str(path), "3", "500"], env=environ, capture_output=True, text=True, check=False)


def test_threads_have_no_race(tmp_path):
    done = sanitized(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("slip", ["relaxed stores", "relaxed loads", "one slot"])
def test_a_slip_fails_with_threads_too(tmp_path, slip):
    before, after, _ = SLIPS[slip]
    assert sanitized(tmp_path, (before, after)).returncode
