"""The most skewed layers come first, and a rank is named only where it is known."""

from server.view.skewed import Skewed, most_skewed, ranks_of
from support.view_reports import figures, group, layer, member

LAYERS = figures(layer("stem", 0.01, 0.0, 0.02), layer("bn1", 0.0, 0.25, 0.05), layer("bn2", 0.1, 0.0, 0.0))


def test_they_come_in_order_with_the_rank_that_brings_most():
    of = group(*map(member, range(3)), figures=LAYERS)
    assert most_skewed(of, 2) == [Skewed("bn1", 0.3, 1, 0.25), Skewed("bn2", 0.1, 0, 0.1)]


def test_a_group_without_figures_has_none():
    assert most_skewed(group(), 5) == []


def test_of_two_nobody_is_named():
    of = group(member(0), member(1), figures=figures(layer("bn", 0.3, 0.1)))
    assert [found.rank for found in most_skewed(of, 1)] == [None]


def test_ranks_of_another_group_are_those_of_its_members():
    of = group(*map(member, (3, 5, 9)), group="odd", figures=LAYERS)
    assert most_skewed(of, 1)[0].rank == 5
    assert most_skewed(of | {"members": of["members"][1:]}, 1)[0].rank is None, "one has left"
    cut = of | {"members": of["members"][:1], "members_left_out": 2}
    assert most_skewed(cut, 1)[0].rank is None, "the report has no room for it"


def test_ranks_that_a_report_has_no_room_for_are_not_known():
    of = group(member(5), member(3), group="odd", members_left_out=2)
    assert ranks_of(of, 4) == [3, 5, None, None]
    assert ranks_of(of, 5) == [None] * 5, "one has left"


def test_a_rank_of_the_world_is_known_even_if_others_have_left():
    assert most_skewed(group(member(1), figures=LAYERS), 1)[0].rank == 1
