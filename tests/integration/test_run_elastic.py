"""Processes train a model with batch norm under `run_elastic` while one is killed and another comes."""

from contextlib import ExitStack
from functools import partial

from programs.elastic_training_programs import SAMPLES, started

EPOCHS = 8


def test_after_a_kill_and_with_a_newcomer_all_end_with_the_same_bits_and_no_sample_lost_or_repeated(server, job):
    with ExitStack() as stack:
        start = partial(started, server.endpoint, job, world_size=3, epochs=EPOCHS)
        first, killed, third, newcomer = (stack.enter_context(start(member=member)) for member in range(4))
        for member in (first, killed, third):
            member.go()
        # Its commits are after batches 3, 6 and so on: what it has done since is to be undone.
        killed.wait_for_batch(8)
        killed.process.kill()
        # By now the other two know of it.
        first.wait_for_batch(20)
        newcomer.go()
        results = [member.result() for member in (first, third, newcomer)]
    for bits, times_learnt, batches in results:
        assert bits == results[0][0]
        assert times_learnt == [float(EPOCHS)] * SAMPLES
        assert batches > 0
