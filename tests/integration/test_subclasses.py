"""Subclasses of torch's batch norm between processes: they train as on the whole batch, eager and compiled."""

import pytest

from programs import subclass_programs
from support.whole_batch import assert_equal


@pytest.mark.parametrize("backend", ["", "aot_eager", "inductor"])
def test_members_train_as_on_the_whole_batch(members, backend):
    expected = subclass_programs.train_on_the_whole_batch()
    for found in members(2, subclass_programs.train, backend):
        assert_equal(found, expected, 1e-9)
