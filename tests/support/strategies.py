"""Messages for tests: plain ones with defaults for their fields, and hypothesis strategies."""

from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from statsd_bn import limits, messages
from statsd_bn.members import Members
from statsd_bn.reduction import Rows
from statsd_bn.round_key import BACKWARD, FORWARD, RoundKey
from statsd_bn.skew import FIGURES


def session_of(member: int, job: str = "job") -> bytes:
    return f"{job[-5:]:>5}{member:03d}".encode()


def register(member: int = 0, world_size: int = 2, **given: Any) -> messages.Register:
    job = given.setdefault("job", "job")
    sound = {
        "session": session_of(member, job),
        "group": "world",
        "epoch": 0,
        "min_members": 0,
        "deadline": 600.0,
        "place": f"place {member}",
    }
    return messages.Register(member=member, world_size=world_size, **{**sound, **given})


def key(layer: str = "bn", **given: Any) -> RoundKey:
    sound = {"job": "job", "group": "world", "epoch": 0, "step": 0, "call": 0, "phase": FORWARD}
    return RoundKey(layer=layer, **{**sound, **given})


def rows(*values: float, channels: int = 1, vectors: int = 1, count: int = 1) -> Rows:
    filled = np.empty((len(values), vectors, channels))
    filled[:] = np.reshape(values, (-1, 1, 1))
    return Rows((count,) * len(values), filled)


KEY = key()


def contribution(
    member: int, own_rows: Rows | float = 1.0, key: RoundKey = KEY, session: bytes | None = None
) -> messages.Contribution:
    """A member's contribution to a round: `Rows`, or one row of one number."""
    if not isinstance(own_rows, Rows):
        own_rows = rows(own_rows)
    return messages.Contribution(session or session_of(member, key.job), key, 0, own_rows)


def is_probe(answer: object) -> bool:
    """Whether a message is a probe, by which the server checks that a member is reachable."""
    return isinstance(answer, messages.Registered) and answer.digest == messages.NO_SERVER


counters = st.integers(0, limits.MAX_COUNTER)
counts = st.integers(0, limits.MAX_COUNT)
member_numbers = st.integers(0, limits.MAX_MEMBERS - 1)
tokens = st.binary(min_size=limits.TOKEN_BYTES, max_size=limits.TOKEN_BYTES)
letters = st.characters(categories=["L", "M", "N", "P", "S"], include_characters=" ")
names = st.text(letters, min_size=1, max_size=limits.MAX_NAME_BYTES // 4)
texts = st.text(letters | st.sampled_from("\n\t"), max_size=200)
phases = st.sampled_from([FORWARD, BACKWARD, "backward 2"])
keys = st.builds(RoundKey, names, names, counters, counters, names, counters, phases)
facts = st.dictionaries(
    names,
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | texts | st.binary(max_size=20),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
        max_leaves=8,
    ),
    max_size=4,
)


def values(*shape: st.SearchStrategy[int]) -> st.SearchStrategy[np.ndarray]:
    """Any float64 of these extents: NaN with its payload, inf and -0.0 as well."""
    return st.tuples(*shape).flatmap(lambda extents: hnp.arrays(np.dtype("<f8"), extents))


vectors_and_channels = st.integers(1, limits.MAX_VECTORS), st.integers(1, 9)


@st.composite
def any_rows(draw: st.DrawFn) -> Rows:
    filled = draw(values(st.integers(1, 4), *vectors_and_channels))
    return Rows(tuple(draw(counts) for _ in filled), filled)


@st.composite
def registers(draw: st.DrawFn) -> messages.Register:
    return messages.Register(
        session=draw(tokens),
        job=draw(names),
        group=draw(names),
        epoch=draw(counters),
        member=draw(member_numbers),
        world_size=(world_size := draw(st.integers(1, limits.MAX_MEMBERS))),
        min_members=draw(st.integers(0, world_size)),
        deadline=draw(st.floats(0.0, limits.MAX_DEADLINE, exclude_min=True)),
        place=draw(names),
        participation=draw(st.sampled_from([participation.value for participation in messages.Participation])),
        server=draw(tokens),
        step=draw(counters),
        first_step=draw(counters),
        results=draw(st.integers(0, limits.CACHED_ROUNDS)),
        known=draw(members),
    )


members = st.lists(member_numbers, max_size=20).map(Members.of)


@st.composite
def aggregates(draw: st.DrawFn) -> messages.Aggregate:
    replicas = draw(st.integers(1, limits.MAX_REPLICAS * limits.MAX_MEMBERS))
    contributors, sums = draw(members), draw(values(*vectors_and_channels))
    return messages.Aggregate(draw(keys), replicas, draw(counts), contributors, sums, non_finite=draw(members))


@st.composite
def digests(draw: st.DrawFn) -> messages.SkewStats:
    layers = draw(st.lists(names, min_size=1, max_size=3))
    shape = len(layers), draw(st.integers(1, 4)), FIGURES
    figures = draw(hnp.arrays(np.float64, shape, elements=st.floats(0, 1)))
    return messages.SkewStats(draw(tokens), draw(counters), "\n".join(layers), figures)


@st.composite
def figures(draw: st.DrawFn) -> messages.Figures:
    layers = draw(st.lists(names, max_size=3))
    shape = len(layers), draw(st.integers(min(1, len(layers)), 4)), FIGURES
    values = draw(hnp.arrays(np.float64, shape, elements=st.floats(0, 1)))
    return messages.Figures(draw(names), draw(names), draw(counters), draw(counters), "\n".join(layers), values)


MESSAGES: dict[type[messages.Message], st.SearchStrategy[messages.Message]] = {
    messages.Register: registers(),
    messages.Registered: st.builds(messages.Registered, tokens, tokens, counters, counters, member_numbers, members),
    messages.Contribution: st.builds(messages.Contribution, tokens, keys, counters, any_rows()),
    messages.Aggregate: aggregates(),
    messages.Leave: st.builds(messages.Leave, tokens, texts),
    messages.Failure: st.builds(messages.Failure, names, texts, facts, st.none() | keys),
    messages.StatusRequest: st.builds(messages.StatusRequest),
    messages.Status: st.builds(messages.Status, facts),
    messages.Heartbeat: st.builds(
        messages.Heartbeat, tokens, counters, counters, st.just("") | st.text("abc", max_size=9), st.just("") | names
    ),
    messages.Pending: st.builds(messages.Pending, keys, counters, texts.filter(bool), texts),
    messages.Result: st.builds(messages.Result, tokens, aggregates()),
    messages.StackRequest: st.builds(messages.StackRequest, tokens, counters, st.just("") | names),
    messages.StackReport: st.builds(
        messages.StackReport,
        tokens,
        counters,
        texts,
        st.integers(0, 1),
        st.just("") | names,
        members,
        counters,
        st.just("") | names,
    ),
    messages.RoundDone: st.builds(messages.RoundDone, tokens, keys),
    messages.SkewStats: digests(),
    messages.RoundTrips: st.builds(messages.RoundTrips, tokens, counters, st.tuples(*[counters] * limits.BUCKETS)),
    messages.LatenessReport: st.builds(
        messages.LatenessReport, tokens, counters, st.tuples(*[counters] * limits.BUCKETS)
    ),
    messages.NonFiniteRound: st.builds(messages.NonFiniteRound, tokens, keys, members.filter(bool), names),
    messages.FiguresRequest: st.builds(messages.FiguresRequest, names, names, counters),
    messages.Figures: figures(),
}

any_message = st.one_of(*MESSAGES.values())


AGGREGATE = messages.Aggregate(KEY, 1, 1, Members.of([0]), np.ones((2, 3)))

SAMPLES: dict[type[messages.Message], messages.Message] = {
    type(message): message
    for message in (
        register(),
        messages.Registered(b"session0", b"server00", 1, 2, 4, Members.of([3, 300])),
        messages.Contribution(b"session0", KEY, 0, Rows((1,), np.ones((1, 2, 3)))),
        AGGREGATE,
        messages.Leave(b"session0", "boom"),
        messages.Failure("mismatch", "no", {"member": 1, "got": [1, 2.5, None]}, KEY),
        messages.StatusRequest(),
        messages.Status({"groups": [{"job": "j"}]}),
        messages.Heartbeat(b"session0", 7, 40, "shared_memory"),
        messages.Pending(KEY, 3, "waiting"),
        messages.Result(b"session0", AGGREGATE),
        messages.StackRequest(b"digest00", 3),
        messages.StackReport(b"session0", 3, "train.py:1 main", 1, "0", Members.of([0, 1]), 7, "barrier"),
        messages.RoundDone(b"session0", KEY),
        messages.SkewStats(b"session0", 7, "bn1\nbn2", np.full((2, 3, 4), 0.5)),
        messages.RoundTrips(b"session0", 500, (0, 3, *[0] * 22)),
        messages.LatenessReport(b"session0", 500, (0, 3, *[0] * 22)),
        messages.NonFiniteRound(b"session0", KEY, Members.of([1]), "1 of 3 channels (inf)"),
        messages.FiguresRequest("job", "world", 2),
        messages.Figures("job", "world", 2, 4, "bn1\nbn2", np.full((2, 3, 4), 0.5)),
    )
}
