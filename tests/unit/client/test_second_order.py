"""Second derivatives across replicas, which torch.nn.SyncBatchNorm lacks and gradient penalties need."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from client.ops.exchange import Exchange
from client.ops.functional import Slice, batch_norm
from client.transports.transport import LocalPipe

SIZES = (3, 1, 2)
CHANNELS = 2
MASKS = (
    torch.tensor([[1, 1, 0], [0, 1, 0], [1, 1, 1]]),
    torch.tensor([[0, 0, 0]]),
    torch.tensor([[1, 0, 1], [1, 1, 0]]),
)


def leaves(sizes=SIZES):
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(n, CHANNELS, 3, generator=generator, dtype=torch.float64) for n in sizes]
    weight = torch.rand(CHANNELS, generator=generator, dtype=torch.float64) + 0.5
    bias = torch.randn(CHANNELS, generator=generator, dtype=torch.float64)
    return [tensor.requires_grad_() for tensor in (*inputs, weight, bias)]


def in_process(eps_mode="plus", masks=(None,) * 3, eps=1e-5):
    def run(*tensors):
        *inputs, weight, bias = tensors
        slices = [Slice(x, weight, bias, mask) for x, mask in zip(inputs, masks, strict=True)]
        return tuple(batch_norm(slices, Exchange(LocalPipe("bn"), "bn", eps, eps_mode)))

    return run


@pytest.mark.parametrize("masks", [(None,) * 3, [mask.bool() for mask in MASKS]], ids=["whole", "masked"])
@pytest.mark.parametrize(("eps_mode", "eps"), [("plus", 1e-5), ("clamp", 1e-5), ("clamp", 1.0)])
def test_first_and_second_gradients_are_right_across_replicas(eps_mode, eps, masks):
    run = in_process(eps_mode, masks, eps)
    assert gradcheck(run, leaves())
    assert gradgradcheck(run, leaves())


def test_an_empty_replica_takes_part_in_the_second_backward():
    assert gradgradcheck(in_process(), leaves((3, 0, 2)))


def test_second_gradients_are_right_without_affine_parameters():
    def run(*inputs):
        slices = [Slice(x, None, None) for x in inputs]
        return tuple(batch_norm(slices, Exchange(LocalPipe("bn"), "bn", 1e-5, "plus")))

    assert gradgradcheck(run, leaves()[:3])


def test_where_no_input_needs_a_gradient_the_weights_second_gradient_takes_no_round():
    rounds = []

    class CountingPipe(LocalPipe):
        def run_slave(self, contribution, key=None, **named):
            rounds.append(key)
            return super().run_slave(contribution, key, **named)

    *inputs, weight, bias = leaves()
    factors = [torch.randn_like(x).requires_grad_() for x in inputs]
    slices = [Slice(x.detach(), weight, bias) for x in inputs]
    outputs = batch_norm(slices, Exchange(CountingPipe("bn"), "bn", 1e-5, "plus"))
    loss = sum((output * factor).sum() for output, factor in zip(outputs, factors, strict=True))
    (by_weight, by_bias) = torch.autograd.grad(loss, (weight, bias), create_graph=True)
    ((by_weight**2).sum() + (by_bias**3).sum()).backward()
    assert rounds == [None]
    whole = torch.cat([x.detach() for x in inputs])
    normal = torch.nn.functional.batch_norm(whole, None, None, training=True)
    joined = torch.cat([factor.detach() for factor in factors]).requires_grad_()
    expected = ((joined * normal).sum((0, 2)) ** 2).sum() + (joined.sum((0, 2)) ** 3).sum()
    expected.backward()
    torch.testing.assert_close(torch.cat([factor.grad for factor in factors]), joined.grad)


def test_torch_func_takes_first_and_second_gradients():
    *inputs, weight, bias = (leaf.detach() for leaf in leaves())

    def loss(*inputs):
        return sum((output**3).sum() for output in in_process()(*inputs, weight, bias))

    def whole_loss(x):
        return (torch.nn.functional.batch_norm(x, None, None, weight, bias, training=True) ** 3).sum()

    whole = torch.cat(inputs)
    first = torch.func.grad(loss, argnums=(0, 1, 2))(*inputs)
    torch.testing.assert_close(torch.cat(first), torch.func.grad(whole_loss)(whole))
    second = torch.func.grad(
        lambda *inputs: (torch.cat(torch.func.grad(loss, argnums=(0, 1, 2))(*inputs)) ** 2).sum(), argnums=(0, 1, 2)
    )(*inputs)
    expected = torch.func.grad(lambda x: (torch.func.grad(whole_loss)(x) ** 2).sum())(whole)
    torch.testing.assert_close(torch.cat(second), expected)


def test_an_infinite_gradient_passes_through_as_in_torch_and_nothing_warns():
    *inputs, weight, bias = leaves()
    outputs = in_process()(*inputs, weight, bias)
    grads = [torch.full_like(output, sign * torch.inf) for output, sign in zip(outputs, (1, 1, -1), strict=True)]
    first = torch.autograd.grad(outputs, inputs, grads, create_graph=True)
    sum(gradient.square().sum() for gradient in first).backward()
    assert all(x.grad.isnan().all() for x in inputs)


def test_a_third_derivative_is_refused_rather_than_wrong():
    *inputs, weight, bias = leaves()
    outputs = in_process()(*inputs, weight, bias)
    (first,) = torch.autograd.grad((outputs[0] ** 3).sum(), inputs[0], create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="not the third"):
        second.sum().backward()
