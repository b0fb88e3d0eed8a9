"""Layers that synchronise with some members equal nn.BatchNorm on the joint batch of these members."""

import pytest
import torch

import client
from programs import group_programs
from programs.group_programs import SIZES
from statsd_bn.errors import ConfigurationError
from support.sentences import says
from support.whole_batch import assert_equal_to_whole_batch, joined


def test_each_group_equals_the_whole_batch_of_its_members(members):
    results = members(4, group_programs.as_member_of_a_pair)
    for pair in range(2):
        assert_equal_to_whole_batch(joined(results[2 * pair : 2 * pair + 2]), group_programs.pair_case(pair))


@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["eager", "compiled"])
def test_a_model_may_have_layers_of_several_groups(members, backend):
    outputs, by_input, by_parameters = group_programs.whole_model()
    results = members(4, group_programs.as_member_of_many_groups, backend)
    for member, (output, _, _) in enumerate(results):
        torch.testing.assert_close(output, outputs[member], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.cat([found for _, found, _ in results]), by_input, rtol=1e-10, atol=1e-10)
    for number, expected in enumerate(by_parameters):
        summed = sum(found[number] for _, _, found in results)
        torch.testing.assert_close(summed, expected, rtol=1e-10, atol=1e-10)


def test_a_member_outside_of_a_group_may_leave_while_it_trains(members):
    assert members(3, group_programs.train_in_a_pair_or_leave, 20) == [40, 40, 0]


def test_precise_statistics_are_those_of_the_layers_group(members):
    shards = group_programs._tensors()[0].split(SIZES)
    results = members(4, group_programs.recalibrate_in_pairs)
    for member, (mean, variance, batches) in enumerate(results):
        first = member // 2 * 2
        population = torch.cat([shards[first]] * (first + 1) + [shards[first + 1]] * (first + 2))
        torch.testing.assert_close(mean, population.mean((0, 2)))
        torch.testing.assert_close(variance, population.var((0, 2)))
        assert batches == 2 * first + 3


@pytest.mark.parametrize(
    "make",
    [
        lambda group: client.SynchronizedBatchNorm2d(3, group=group),
        lambda group: client.LazySynchronizedBatchNorm2d(group=group),
        lambda group: client.convert_model(torch.nn.BatchNorm2d(3), group=group),
    ],
    ids=["layer", "lazy layer", "convert_model"],
)
def test_an_invalid_group_is_refused_when_the_layer_is_made(make):
    with pytest.raises(
        ConfigurationError, check=says(r"group: expected None, 'local' or a .*Group, got 'left'; .*size")
    ):
        make("left")
    group = client.Group("left", 2)
    assert make(group).group == group
    assert make("local").group == "local"


def test_a_layer_shows_its_group():
    layer = client.SynchronizedBatchNorm2d(3, group=client.Group("left", 2))
    assert "group=Group(name='left', size=2)" in repr(layer)
