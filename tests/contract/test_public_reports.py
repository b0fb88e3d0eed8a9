"""Ways to train for which users reported errors of other synchronised batch norms: each equals the whole batch."""

import pytest

from programs import public_report_programs as programs
from support.comparison import assert_close


@pytest.mark.parametrize("report", programs.REPORTS[:4], ids=lambda report: report.__name__)
def test_virtual_replicas_train_as_on_the_whole_batch(report):
    assert_close(report(programs.Replicas()), report(programs.Part()))


@pytest.mark.parametrize("report", programs.REPORTS, ids=lambda report: report.__name__)
def test_ranks_train_as_on_the_whole_batch(ranks, report, either):
    check(ranks, report, either)


def test_ranks_train_so_on_what_spawned_workers_load(ranks, connected):
    check(ranks, programs.spawned_workers, connected)


def check(ranks, report, job):
    expected = report(programs.Part())
    for found in ranks(2, programs.on_a_rank, report, job):
        assert_close(found, expected)
