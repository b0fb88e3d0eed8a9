"""Copies of the incoming gradient in a backward pass, when its memory layout differs from the input's."""

from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import client
from client.ops.reference import Fused
from client.ops.statistics import same_layout
from support.cuda_stand_ins import as_on_cuda, on_the_cpu

SHAPE = (4, 3, 5, 6)


class Copies(TorchDispatchMode):
    def __init__(self, size):
        super().__init__()
        self.size, self.number = size, 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        found = operator(*args, **(kwargs or {}))
        if operator.name() in {"aten::copy_", "aten::_to_copy", "aten::clone"} and found.numel() == self.size:
            self.number += 1
        return found


@contextmanager
def over_the_host_on_cuda():
    with on_the_cpu(), mock.patch.object(Fused, "supports", return_value=True):
        yield


WAYS = {"on a CPU": nullcontext, "on CUDA over the host": over_the_host_on_cuda, "on CUDA": lambda: as_on_cuda("cpu")}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_gradient_of_another_layout_is_copied_once(way):
    """The backward pass reads the gradient twice: for the sums, and after the round for the input's gradient."""
    model = client.DataParallelWithCallback(client.SynchronizedBatchNorm2d(3), ["cpu"] * 2)
    x = torch.randn(SHAPE).contiguous(memory_format=torch.channels_last).requires_grad_()
    with way():
        output = model(x)
        with Copies(x.numel() // 2) as copies:
            output.backward(torch.randn(SHAPE))
    assert copies.number == 2, "one for each replica"


@pytest.mark.parametrize(
    "grad", [torch.randn(SHAPE), torch.randn(SHAPE).transpose(2, 3).reshape(SHAPE)[:, :1].expand(SHAPE)]
)
def test_a_gradient_of_another_type_and_layout_is_copied_once(grad):
    x = torch.randn(SHAPE, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    with Copies(x.numel()) as copies:
        found, _ = same_layout(grad, x)
    assert copies.number == 1
    assert (found.dtype, found.stride()) == (x.dtype, x.stride())
    assert torch.equal(found, grad.bfloat16())
