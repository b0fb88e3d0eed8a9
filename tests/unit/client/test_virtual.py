"""Scatter, replicate, parallel_apply and gather around virtual replicas follow torch's rules."""

import collections
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from client.data_parallel import any_device

CPU = torch.device("cpu")
Pair = collections.namedtuple("Pair", "left right")  # noqa: PYI024 - torch's scatter supports this kind


def test_tensors_are_chunked_wherever_they_are_and_the_rest_is_shared():
    shared = object()
    inputs = (torch.arange(5), [torch.arange(5), {"deep": (torch.arange(5),)}], shared, Pair(torch.arange(5), "text"))
    args, kwargs = any_device.scatter(inputs, {"flag": True, "x": torch.arange(5)}, [CPU] * 3, 0)
    assert len(args) == len(kwargs) == 3
    for replica, expected in enumerate(([0, 1], [2, 3], [4])):
        plain, nested, same, pair = args[replica]
        assert plain.tolist() == nested[0].tolist() == nested[1]["deep"][0].tolist() == expected
        assert pair.left.tolist() == kwargs[replica]["x"].tolist() == expected
        assert same is shared
        assert (pair.right, kwargs[replica]["flag"]) == ("text", True)
        assert isinstance(pair, Pair)


class Attributes(dict):
    """A dict whose items are also attributes."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


def test_a_dict_with_attributes_has_its_part_as_item_and_as_attribute():
    args, _ = any_device.scatter((Attributes(x=torch.arange(4)),), {}, [CPU] * 2, 0)
    assert [(batch.x.tolist(), batch["x"].tolist()) for (batch,) in args] == [([0, 1], [0, 1]), ([2, 3], [2, 3])]
    joined = any_device.gather([Attributes(y=torch.zeros(1)), Attributes(y=torch.ones(1))], CPU, 0)
    assert joined.y.tolist() == joined["y"].tolist() == [0, 1]
    default = collections.defaultdict(list, x=torch.arange(2))
    assert any_device.scatter((default,), {}, [CPU] * 2, 0)[0][1][0]["none"] == []


def test_chunks_are_torchs_and_may_be_fewer_than_devices():
    args, _ = any_device.scatter((torch.arange(6),), {}, [CPU] * 4, 0)
    assert [arg[0].tolist() for arg in args] == [[0, 1], [2, 3], [4, 5]]


def test_another_dimension_can_hold_the_batch():
    args, _ = any_device.scatter((torch.ones(3, 4),), {}, [CPU] * 2, 1)
    assert [arg[0].shape for arg in args] == [(3, 2), (3, 2)]


class Batch(dict):
    """A data loader's batch."""


class Images(list):
    """One tensor per size."""


class Both(tuple):
    __slots__ = ()


def test_containers_of_user_classes_are_split_and_joined_as_well():
    batch = Batch(x=torch.arange(4), more=Images([torch.arange(4), Both((torch.arange(4), None))]), empty=Batch())
    args, _ = any_device.scatter((batch,), {}, [CPU] * 2, 0)
    (first,), (second,) = args
    assert first["x"].tolist() == first["more"][0].tolist() == first["more"][1][0].tolist() == [0, 1]
    assert [type(first), type(second["more"]), type(second["more"][1])] == [Batch, Images, Both]
    joined = any_device.gather([first, second], CPU, 0)
    assert type(joined) is Batch
    assert joined["x"].tolist() == joined["more"][1][0].tolist() == [0, 1, 2, 3]


def test_no_arguments_give_no_parts():
    assert any_device.scatter((), {}, [CPU] * 2, 0) == ((), ())


def test_replicas_have_no_own_parameters_and_gradients_add_up_in_the_module():
    module = nn.Linear(2, 1, bias=False)
    replicas = any_device.replicate(module, [CPU] * 3)
    assert all(not list(replica.parameters()) for replica in replicas)
    sum(replica(torch.ones(1, 2)).sum() * factor for factor, replica in enumerate(replicas)).backward()
    assert module.weight.grad.tolist() == [[3.0, 3.0]]


def test_gradients_add_up_in_replica_order_whatever_the_order_of_use():
    module = nn.Linear(1, 1, bias=False)
    factors = [1e8, 1.0, -1e8, 1.0]
    gradients = set()
    for order in ((0, 1, 2, 3), (3, 1, 0, 2), (2, 0, 3, 1)):
        replicas = any_device.replicate(module, [CPU] * 4)
        sum(replicas[number].weight.sum() * factors[number] for number in order).backward()
        gradients.add(module.weight.grad.item())
        module.weight.grad = None
    assert gradients == {1.0}


def test_a_frozen_parameter_stays_frozen_in_the_replicas():
    module = nn.Linear(2, 1)
    module.weight.requires_grad_(requires_grad=False)
    replicas = any_device.replicate(module, [CPU] * 2)
    assert [(replica.weight.requires_grad, replica.bias.requires_grad) for replica in replicas] == [(False, True)] * 2


def test_replica_0_shares_its_buffers_and_the_others_have_copies():
    module = nn.BatchNorm1d(2)
    first, second = any_device.replicate(module, [CPU] * 2)
    first.running_mean.fill_(5.0)
    second.running_mean.fill_(7.0)
    assert module.running_mean.tolist() == [5.0, 5.0]


def test_a_module_used_twice_is_one_module_in_each_replica():
    shared = nn.Linear(1, 1)
    (replica,) = any_device.replicate(nn.ModuleList([shared, nn.Sequential(shared)]), [CPU])
    assert replica[0] is replica[1][0]


class Modes(nn.Module):
    def forward(self):
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
        )


def run(replicas, inputs=(), kwargs=None):
    finished, failed = [], []
    number = len(replicas)
    barrier = SimpleNamespace(finish=finished.append, fail=lambda *of_replica: failed.append(of_replica))
    outputs = any_device.parallel_apply(replicas, [inputs] * number, [kwargs or {}] * number, [CPU] * number, barrier)
    return outputs, finished, failed


def test_replicas_run_in_the_callers_grad_inference_and_autocast_modes():
    assert run([Modes()] * 2)[0] == [(True, False, False, torch.bfloat16)] * 2
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        assert run([Modes()] * 2)[0] == [(False, False, True, torch.float16)] * 2
    with torch.inference_mode():
        assert run([Modes()] * 2)[0] == [(False, True, False, torch.bfloat16)] * 2


class Threads(nn.Module):
    def forward(self):
        return torch.get_num_threads()


def test_replicas_follow_the_callers_number_of_torch_threads(set_threads):
    for number in (2, 1):
        set_threads(number)
        assert run([Threads()] * 3)[0] == [number] * 3


def test_no_replica_runs_in_the_callers_thread():
    caller = threading.get_ident()

    class Where(nn.Module):
        def forward(self):
            return threading.get_ident()

    assert caller not in run([Where()] * 3)[0]


def test_finished_replicas_are_reported():
    outputs, finished, failed = run([nn.Identity(), nn.Identity()], (torch.ones(1),))
    assert len(outputs) == 2
    assert sorted(finished) == [0, 1]
    assert failed == []


def test_outputs_are_joined_in_their_structure():
    outputs = [{"x": (torch.full((2, 1), float(i)), None)} for i in range(2)]
    joined = any_device.gather(outputs, CPU, 0)
    assert joined["x"][0].flatten().tolist() == [0.0, 0.0, 1.0, 1.0]
    assert joined["x"][1] is None


def test_scalars_become_a_vector_with_a_warning():
    with pytest.warns(UserWarning, match="returned scalars"):
        assert any_device.gather([torch.tensor(1.0), torch.tensor(2.0)], CPU, 0).tolist() == [1.0, 2.0]


def test_outputs_that_cannot_be_joined_are_named():
    with pytest.raises(TypeError, match=r"expected tensors, got \['int'\]"):
        any_device.gather([1, 2], CPU, 0)
    with pytest.raises(ValueError, match="expected the same structure"):
        any_device.gather([(torch.ones(1),), [torch.ones(1)]], CPU, 0)


def test_gathering_keeps_types_under_autocast():
    halves = [torch.ones(2, dtype=torch.float16), torch.zeros(1, dtype=torch.float16)]
    with torch.autocast("cpu", torch.bfloat16):
        assert any_device.gather(halves, CPU, 0).dtype == torch.float16
