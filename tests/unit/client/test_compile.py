"""torch.compile makes one graph of a model, in train and eval, with eager's results; torch.export works in eval."""

import numpy as np
import pytest
import torch
from torch import nn

import client
from client.nn import custom_op
from client.ops import exchange
from client.ops.exchange import MAX_COUNTED_CALLS, count_backward_pass
from client.session import connection as current
from programs import member_programs
from statsd_bn.errors import ConfigurationError
from support.memory_members import MemoryMaster

# For tests that do not depend on generated code: the backend that only traces is twenty times faster.
TRACE = "aot_eager"

MOMENTUM = pytest.mark.parametrize("momentum", [pytest.param(0.1, marks=pytest.mark.long), None])


def assert_equal(results, tolerance=1e-9):
    for found, expected in results:
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


@MOMENTUM
def test_members_compiled_whole_train_as_eager(members, momentum):
    assert_equal(members(2, member_programs.train_compiled, TRACE, momentum, 3))


@pytest.mark.long
def test_members_compiled_by_inductor_train_as_eager(members):
    assert_equal(members(2, member_programs.train_compiled, "inductor", None, 3))


def test_a_compiled_member_trains_with_an_eager_one(members):
    assert_equal(members(2, member_programs.train_with_member_0_compiled, TRACE, 3))


def test_rounds_keep_the_order_of_the_program(members):
    for order in members(2, member_programs.order_of_compiled_branches, TRACE):
        assert order == ["a", "b", "c", "c", "b", "a"]


def test_calling_a_layer_twice_on_the_same_input_is_two_rounds(members):
    """If a compiler merged equal calls into one, the other members would wait."""
    assert members(2, member_programs.compiled_twice_on_the_same_input, TRACE) == [(4, 2)] * 2


def test_masks_and_layers_without_parameters_or_statistics_compile(members):
    assert_equal(members(2, member_programs.compiled_masks, TRACE))


@pytest.mark.parametrize("policy", ["strict", "elastic"])
def test_in_eval_masks_send_nothing(members, policy):
    results = members(2, member_programs.compiled_masks_in_eval, TRACE, policy=policy)
    assert [rounds for _, rounds in results] == [0, 0]
    assert_equal([found for found, _ in results])


def test_no_user_group_can_have_the_name_of_the_group_for_eval():
    with pytest.raises(ConfigurationError, match="reserved"):
        client.Group(*custom_op.THIS_PROCESS)


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["plain", "checkpoint"])
@pytest.mark.parametrize("who", [(0, 1), (0,)], ids=["both compiled", "one compiled"])
def test_a_graph_that_is_kept_allows_another_backward_pass_even_after_another_forward(members, who, is_checkpointed):
    for phases, *gradients in members(2, member_programs.backward_through_compiled_again, TRACE, who, is_checkpointed):
        assert phases == ["forward", "backward", "forward", "backward 2", "backward", "backward 3"] * 2
        assert_equal([gradients])


def test_the_call_with_the_oldest_last_backward_pass_is_forgotten_first():
    exchange._passes_of.cache_clear()
    assert [count_backward_pass(call) for call in (0, 1, 0)] == [1, 1, 2]
    for call in range(2, MAX_COUNTED_CALLS + 1):
        assert count_backward_pass(call) == 1
    assert [count_backward_pass(call) for call in (0, 1)] == [3, 1]
    exchange._passes_of.cache_clear()


def test_checkpoints_around_and_inside_a_compiled_model_move_the_statistics_once(members):
    """A checkpoint inside must save the results of our operator: torch cannot recompute operators with side effects."""
    # In older versions of torch the backend aot_eager recomputes saved operators too.
    for around, inside, none in members(2, member_programs.compiled_checkpoint, "aot_eager_decomp_partition"):
        assert_equal([(around[0], none[0]), (inside[0], none[0])])
        assert [rounds for _, rounds in (around, inside, none)] == [2, 2, 2]


@pytest.mark.parametrize("backend", [TRACE, pytest.param("inductor", marks=pytest.mark.long)])
def test_a_large_mean_costs_a_compiled_layer_no_digits(monkeypatch, backend):
    torch.compiler.reset()
    monkeypatch.setattr(client.SynchronizedBatchNorm, "_must_synchronise", lambda *_: True)
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(8, 3, 20, 20, generator=generator) for _ in range(2))
    results = []
    for layer, dtype in ((client.SynchronizedBatchNorm2d(3), torch.float32), (nn.BatchNorm2d(3), torch.float64)):
        leaf = (x + 1_000).to(dtype).requires_grad_()
        output = torch.compile(layer.to(dtype), fullgraph=True, backend=backend)(leaf)
        output.backward(grad.to(dtype))
        results.append([each.double() for each in (output, leaf.grad, layer.weight.grad, layer.running_var)])
    torch.testing.assert_close(*results, rtol=2e-6, atol=2e-6)


def test_another_batch_size_is_compiled_too(members):
    assert_equal(members(2, member_programs.compiled_with_growing_batches, TRACE))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_layer_alone_compiles_as_torchs(training, momentum):
    torch.compiler.reset()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, momentum=momentum), nn.Tanh()).train(training)
    ours = client.convert_model(nn.Sequential(*plain))
    ours[1].load_state_dict({name: value.clone() for name, value in plain[1].state_dict().items()})
    x = torch.randn(4, 1, 6, 6)
    found = torch.compile(ours, fullgraph=True, backend=TRACE)(x)
    torch.testing.assert_close(found, plain(x))


def test_eval_exports_as_torchs_layer_does():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    plain[1].running_mean.normal_()
    ours = client.convert_model(nn.Sequential(plain[0], plain[1], plain[2])).eval()
    x = torch.randn(4, 1, 6, 6)
    expected, found = (torch.export.export(model, (x,)) for model in (plain, ours))
    assert _operators(found) == _operators(expected)
    torch.testing.assert_close(found.module()(x), plain(x))


def _operators(program):
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
def test_eval_is_traced_for_any_batch_without_a_warning():
    model = client.convert_model(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))).eval()
    traced = torch.jit.trace(model, torch.randn(4, 1, 6, 6))
    x = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(traced(x), model(x))


def test_a_connected_model_in_eval_exports_as_well(members):
    assert members(2, member_programs.export_in_eval) == [0, 0]


LAYOUTS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3),
    "every other row": lambda x: x[:, :, ::2],
    "every other row of channels_last": lambda x: x.to(memory_format=torch.channels_last)[:, :, ::2],
    "half": lambda x: x.half(),
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_operators_keep_the_rules_of_torchs_operators(layout):
    x = layout(torch.randn(4, 3, 6, 5, dtype=torch.float64)).detach().requires_grad_()
    weight, bias = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mask = torch.rand(x.shape[0], *x.shape[2:]) > 0.3
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    for arguments in ((x, weight, bias, None), (x.detach(), None, None, mask)):
        torch.library.opcheck(
            torch.ops.statsd_bn.batch_norm.default, (*arguments, "bn", "", 0, 1e-5, "plus"), test_utils=tests
        )
    sums, counted = torch.rand(2, 3, dtype=torch.float64), torch.tensor(4.0, dtype=torch.float64)
    rest = "bn", "", 0, 1e-5, "plus", 0, "forward", torch.float32
    for given in ((sums, None, [4, 3]), (sums, counted, [6, 3])):
        torch.library.opcheck(torch.ops.statsd_bn.exchange.default, (*given, *rest), test_utils=tests)
        _, *found = torch.ops.statsd_bn.exchange(*given, *rest)
        arguments = (*given, *found, *rest[:3], torch.float32)
        torch.library.opcheck(torch.ops.statsd_bn.exchange_backward.default, arguments, test_utils=tests)


def test_the_first_call_of_a_layer_in_the_local_group_compiles_into_one_graph(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.delenv("GROUP_RANK", raising=False)
    layer = client.convert_model(nn.BatchNorm1d(3), group="local")
    x = torch.randn(4, 3)
    with MemoryMaster().connect(0, 1) as open_connection:
        monkeypatch.setattr(current, "_current", open_connection)
        found = torch.compile(layer, fullgraph=True, backend=TRACE)(x)
    assert torch.equal(found, nn.BatchNorm1d(3)(x))
