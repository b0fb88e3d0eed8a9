"""Errors: the event in a short first line, a table of waiting ranks, and a text that fits into a frame."""

import pickle

import pytest

from statsd_bn import errors, limits
from statsd_bn.errors import BY_CODE, StatsdBNError, from_wire
from statsd_bn.text import FIRST_LINE, MAX_ROWS, Row, TableSection, error_summary, error_text, log_line


def place(name: str, *ranks: int, size: int = 0, host: str = "host", below: tuple[str, ...] = ()) -> TableSection:
    rows = [Row((f"rank {rank} ({host})", "waits 1.0 s", name), below) for rank in ranks]
    return TableSection(rows, size or len(ranks), name)


def test_a_text_gives_the_event_the_members_the_place_and_the_remedy():
    table = [place("in a", 0, 10), place("in b", 1)]
    assert error_text("nobody can go on", table=table, where="job 'j'", advice="Look at rank 1.").splitlines() == [
        "nobody can go on",
        "  rank 0 (host)   waits 1.0 s  in a",
        "  rank 10 (host)  waits 1.0 s  in a",
        "  rank 1 (host)   waits 1.0 s  in b",
        "  in job 'j'",
        "Look at rank 1.",
    ]


def test_details_of_a_rank_are_below_its_row():
    text = error_text("no", table=[place("in a", 0, below=("is in train.py:57 main",))])
    assert text.splitlines()[1:] == ["  rank 0 (host)  waits 1.0 s  in a", "      is in train.py:57 main"]


def test_of_many_ranks_a_few_of_each_place_are_named():
    table = [place("in a", *range(MAX_ROWS), size=1023), place("in b", 7)]
    lines = error_text("no", table=table, more_sections=2).splitlines()
    assert len(lines) == 7
    assert lines[4] == "  ... and 1,020 more ranks in a"
    assert lines[5].startswith("  rank 7 (host)")
    assert lines[6] == "  ... and 2 more places"


def test_each_of_a_few_ranks_has_its_own_row():
    lines = error_text("no", table=[place("in a", *range(MAX_ROWS - 1)), place("in b", 99)]).splitlines()
    assert len(lines) == 1 + MAX_ROWS
    assert not any("more" in line for line in lines)


@pytest.mark.parametrize(("host", "places"), [("h" * 256, 8), ("é" * 128, 8), ("h" * 3000, 2)])
def test_a_cut_text_fits_into_a_frame_and_keeps_the_remedy(host, places):
    table = [place(f"in {number}" + "n" * 256, *range(16), size=100, host=host) for number in range(places)]
    text = error_text("no", table=table, more_sections=5, where="job " + "j" * 256, advice="Do it.")
    assert len(text.encode()) <= limits.MAX_TEXT_BYTES
    assert text.endswith("\nDo it.")
    assert " more place" in text


@pytest.mark.parametrize(
    ("what", "first"),
    [
        ("short", "short"),
        ("x" * 200, "x" * FIRST_LINE),
        ("expected one thing of many words that explain it; got another thing " + "of words " * 9, None),
        ("rank 2 (host-b, pid 812) failed with MemoryError: " + "out of memory " * 20, None),
    ],
)
def test_the_first_line_is_short(what, first):
    text = error_text(what)
    line = text.splitlines()[0]
    assert line == (first or line)
    assert 0 < len(line) <= FIRST_LINE
    assert "".join(text.split()) == "".join(what.split())
    assert log_line(text).split() == what.split() or " " not in what


def test_the_longest_class_name_and_first_line_fit_into_120_letters():
    longest = max(len(f"{error.__module__}.{error.__name__}: ") for error in BY_CODE.values())
    assert longest + FIRST_LINE <= 120


def test_a_log_line_holds_the_whole_error():
    error = ValueError(error_text("no", table=[place("in a", 0, 10)], where="job 'j'", advice="Stop."))
    expected = "no; rank 0 (host) waits 1.0 s in a; rank 10 (host) waits 1.0 s in a; in job 'j'; Stop."
    assert log_line(error) == expected
    assert error_summary(error) == "ValueError: no"


def tree(root: type[StatsdBNError] = StatsdBNError) -> list[type[StatsdBNError]]:
    return [root, *(leaf for branch in root.__subclasses__() for leaf in tree(branch))]


every_error = pytest.mark.parametrize("error", tree(), ids=lambda error: error.__name__)


def test_every_code_is_unique():
    codes = [error.code for error in tree()]
    assert sorted(codes) == sorted(set(codes))
    assert sorted(BY_CODE) == sorted(codes)


@every_error
def test_an_error_from_the_wire_has_the_class_of_its_code(error):
    found = from_wire(error.code, "expected 1, got 2", {"expected": 1, "got": [2]})
    assert type(found) is error
    assert found.message == str(found) == "expected 1, got 2"
    assert found.fields == {"expected": 1, "got": [2]}


def test_an_unknown_code_gives_the_base_class():
    found = from_wire("of-the-future", "new trouble", {"a": 1})
    assert type(found) is StatsdBNError
    assert (str(found), found.fields) == ("new trouble", {"a": 1})


@every_error
def test_a_pickled_error_keeps_its_message_and_fields(error):
    found = pickle.loads(pickle.dumps(error("no", member=3, missing=[1, 2])))  # noqa: S301 - our own bytes
    assert type(found) is error
    assert (found.message, found.args, found.fields) == ("no", ("no",), {"member": 3, "missing": [1, 2]})


def test_a_configuration_error_is_a_value_error():
    with pytest.raises(ValueError, match="wrong flag"):
        raise errors.ConfigurationError("wrong flag")
