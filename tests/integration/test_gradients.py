"""Every way to use a layer's gradients gives what nn.BatchNorm gives on the whole batch."""

import re
from functools import partial

import pytest
import torch

from programs import gradient_programs
from programs.gradient_programs import PROGRAMS
from support.transports import HOST_TRANSPORTS, TRANSPORTS
from support.whole_batch import assert_equal, joined

# Forward and backward rounds of each program, and one for the forward that gives the output.
ROUNDS = {
    "two_forwards_then_one_backward": 2 + 2 + 1,
    "called_twice_in_one_forward": 2 + 2 + 1,
    "backward_twice_through_a_kept_graph": 1 + 2 + 1,
    "two_steps_accumulated": 2 + 2 + 1,
    "input_that_needs_no_gradient": 1 + 0 + 1,
    "without_gradients": 2 + 1 + 1,
    "gradient_penalty": 1 + 3 + 1,
}
NAMES = [program.__name__ for program in PROGRAMS]


@pytest.fixture(scope="module")
def expected():
    return dict(zip(NAMES, gradient_programs.on_the_whole_batch(), strict=True))


@pytest.fixture(scope="module")
def virtual():
    return dict(zip(NAMES, gradient_programs.as_virtual_replicas(), strict=True))


def test_members_equal_the_whole_batch_and_need_no_extra_round(members, expected):
    programs = zip(*members(3, gradient_programs.as_member), strict=True)
    for name, results in zip(NAMES, programs, strict=True):
        assert_equal(joined([result for result, _ in results]), expected[name], 1e-10)
        assert [rounds for _, rounds in results] == [ROUNDS[name]] * 3, name


@pytest.mark.parametrize("name", NAMES)
def test_virtual_replicas_equal_the_whole_batch(name, expected, virtual):
    assert_equal(virtual[name], expected[name], 1e-10)


def test_torch_func_gives_the_gradients_of_backward(members):
    for found, expected in members(3, gradient_programs.with_torch_func):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


WITH_STEPS = [*((transport, 0) for transport in TRANSPORTS), *((transport, 2) for transport in HOST_TRANSPORTS)]


@pytest.mark.parametrize(
    ("transport", "steps", "is_compiled"),
    [
        pytest.param(*case, is_compiled, marks=pytest.mark.long if is_compiled and place else [])
        for is_compiled in (False, True)
        for place, case in enumerate(WITH_STEPS)
    ],
)
def test_an_input_that_requires_a_gradient_on_one_rank_only_is_an_error_at_once(over, transport, steps, is_compiled):
    program = partial(gradient_programs.input_that_requires_a_gradient_on_rank_0, is_compiled=is_compiled)
    for text in over(transport, 2, program, steps):
        assert text.startswith(f"{steps}: RoundMismatch: ")
        assert re.search(r"\n  rank 0 .*in (first )?forward of layer 'stem\.bn', ", text)
        assert re.search(r"\n  rank 1 .*in (first )?forward without gradient of layer 'stem\.bn', ", text)
        assert "\nrequires_grad of the layer's input differs between these ranks: call requires_grad_() on it" in text
