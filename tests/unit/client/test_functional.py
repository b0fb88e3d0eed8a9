"""The autograd function: one node for all replicas, with one round in the forward and in each backward pass."""

import pytest
import torch

from client.ops.exchange import Exchange
from client.ops.functional import Slice, batch_norm
from client.transports.server import SlavePipe
from client.transports.transport import LocalPipe
from support.memory_members import run_members

SIZES = (3, 1, 2)


class CountingPipe:
    def __init__(self) -> None:
        self.rounds = []
        self._pipe = LocalPipe("bn")

    def run_slave(self, contribution, key=None, **named):
        self.rounds.append("forward" if key is None else key.phase)
        return self._pipe.run_slave(contribution, key, **named)


def exchange(transport=None, eps_mode="plus"):
    return Exchange(transport or LocalPipe("bn"), "bn", 1e-5, eps_mode)


def tensors(sizes=SIZES, *, affine=True, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(n, 2, 3, generator=generator, dtype=torch.float64).to(dtype) for n in sizes]
    if not affine:
        return inputs, [None] * len(sizes), [None] * len(sizes)
    weight = torch.rand(2, generator=generator, dtype=torch.float64).to(dtype) + 0.5
    bias = torch.randn(2, generator=generator, dtype=torch.float64).to(dtype)
    return inputs, [weight] * len(sizes), [bias] * len(sizes)


def leaves(**options):
    inputs, weights, biases = tensors(**options)
    return [x.requires_grad_() for x in inputs], weights, biases


def slices(inputs, weights, biases):
    return [Slice(*parts) for parts in zip(inputs, weights, biases, strict=True)]


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda run, x: torch.vmap(run)(torch.stack((x, x))), "does not support torch.vmap"),
        (lambda run, x: torch.func.jacrev(run)(x), "does not support torch.vmap"),
        (lambda run, x: torch.func.jvp(run, (x,), (x,)), "no forward-mode derivative"),
    ],
    ids=["vmap", "jacrev", "jvp"],
)
def test_an_unsupported_torch_func_transform_raises_torchs_error(transform, message):
    inputs, weights, biases = tensors((4,))
    with pytest.raises(NotImplementedError, match=f"synchronised batch norm .*{message}"):
        transform(lambda x: batch_norm(slices([x], weights, biases), exchange())[0], inputs[0])


def test_all_replicas_share_one_node_one_round_forward_and_one_backward():
    pipe = CountingPipe()
    inputs, weights, biases = leaves()
    outputs = batch_norm(slices(inputs, weights, biases), exchange(pipe))
    assert len({output.grad_fn for output in outputs}) == 1
    sum((output * output).sum() for output in outputs).backward()
    assert pipe.rounds == ["forward", "backward"]


def test_an_inputs_gradient_does_not_depend_on_which_other_inputs_need_one():
    (only, *_), (expected, *_) = (_input_gradients(nr_needed) for nr_needed in (1, len(SIZES)))
    assert torch.equal(only, expected)


def _input_gradients(nr_needed):
    inputs, weights, biases = tensors()
    for x in inputs[:nr_needed]:
        x.requires_grad_()
    outputs = batch_norm(slices(inputs, weights, biases), exchange())
    return torch.autograd.grad(sum((output**3).sum() for output in outputs), inputs[:nr_needed])


def test_backward_is_local_when_no_input_needs_a_gradient():
    pipe = CountingPipe()
    inputs, weights, biases = tensors()
    for weight in weights:
        weight.requires_grad_()
    outputs = batch_norm(slices(inputs, weights, biases), exchange(pipe))
    sum((output * output).sum() for output in outputs).backward()
    assert pipe.rounds == ["forward"]
    assert all(weight.grad is not None for weight in weights)


def test_every_backward_pass_of_a_kept_graph_is_a_separate_round():
    pipe = CountingPipe()
    inputs, weights, biases = tensors((3,))
    inputs[0].requires_grad_()
    (output,) = batch_norm(slices(inputs, weights, biases), exchange(pipe))
    for _ in range(3):
        torch.autograd.grad((output**2).sum(), inputs[0], retain_graph=True)
    assert pipe.rounds == ["forward", "backward", "backward 2", "backward 3"]


def test_a_graph_that_is_kept_allows_another_backward_pass_even_after_another_forward():
    def member(connection):
        x = torch.randn(3, 2, generator=torch.Generator().manual_seed(connection.rank)).requires_grad_()
        pipe = SlavePipe(connection, "bn")
        (output,) = batch_norm([Slice(x, None, None)], exchange(pipe))
        (first,) = torch.autograd.grad((output**2)[0].sum(), x, retain_graph=True)
        (between,) = batch_norm([Slice(x, None, None)], exchange(pipe))
        (other,) = torch.autograd.grad((output**3).sum(), x, retain_graph=True)
        (again,) = torch.autograd.grad((output**2)[0].sum(), x)
        (between**2).sum().backward()
        return torch.equal(first, again), torch.equal(first, other)

    assert run_members(2, member) == [(True, False)] * 2


def test_an_output_that_is_not_used_counts_as_zero_gradient():
    inputs, weights, biases = leaves()
    outputs = batch_norm(slices(inputs, weights, biases), exchange())
    (outputs[0] ** 2).sum().backward()
    whole = torch.cat([x.detach() for x in inputs]).requires_grad_()
    normal = torch.nn.functional.batch_norm(whole, None, None, training=True)[:3]
    ((normal * weights[0].view(1, -1, 1) + biases[0].view(1, -1, 1)) ** 2).sum().backward()
    torch.testing.assert_close(torch.cat([x.grad for x in inputs]), whole.grad)


def test_outputs_may_be_changed_in_place():
    inputs, weights, biases = leaves(affine=False)
    outputs = batch_norm(slices(inputs, weights, biases), exchange())
    sum((torch.relu_(output) * 2).sum() for output in outputs).backward()
    whole = torch.cat([x.detach() for x in inputs]).requires_grad_()
    (torch.relu(torch.nn.functional.batch_norm(whole, None, None, training=True)) * 2).sum().backward()
    torch.testing.assert_close(torch.cat([x.grad for x in inputs]), whole.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_callers_storage_stays_resizable(dtype):
    """FSDP frees a parameter by resizing its storage; `numpy()` on the parameter would forbid that for good."""
    inputs, weights, biases = tensors(dtype=dtype)
    leaves = [tensor.requires_grad_() for tensor in (*inputs, weights[0], biases[0])]
    outputs = batch_norm(slices(inputs, weights, biases), exchange())
    grads = [torch.randn_like(output, requires_grad=True) for output in outputs]
    found = torch.autograd.grad(outputs, leaves, grads, create_graph=True)
    sum(gradient.square().sum() for gradient in found).backward()
    assert all(tensor.untyped_storage().resizable() for tensor in (*leaves, *outputs, *grads))
