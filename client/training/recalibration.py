"""recalibrate(): population statistics in place of the moving average over the last batches.

The running statistics lag behind the weights. A pass over many batches with fixed weights measures them again
("precise BN": Wu & Johnson, "Rethinking 'Batch' in BatchNorm", 2021, section 3). The average is over values, so it does
not depend on the sizes of the batches, nor on their distribution over the members.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel

from client.nn.batchnorm import SynchronizedBatchNorm
from client.nn.running_stats import MomentAccumulator
from client.session.connection import Connection
from client.tracebacks import api_boundary, warn
from client.training.gradients import split_rows
from client.transports.choose import GroupSpec, communicator_for, transport_for
from client.transports.process_group import NamedProcessGroup
from statsd_bn.errors import RoundMismatch
from statsd_bn.reduction import FloatArray, Moments, is_finite
from statsd_bn.text import wrap

ROUND_NAME = "recalibrate()"  # name of the rounds; no layer's name contains brackets

Accumulators = dict[SynchronizedBatchNorm, MomentAccumulator]
Population = dict[SynchronizedBatchNorm, Moments]


@api_boundary
def recalibrate(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    num_batches: int | None = None,
    progress: Callable[[int], object] | None = None,
) -> int:
    """Replaces the running statistics by the mean and unbiased variance over all batches of all members.

    All members call it, each with its own batches, of any number and size, or none. The forward pass runs without
    gradients, and each synchronised layer normalises with the statistics of this process's batch. Nothing is sent
    before the last batch; then each member sends one message per group with all layers (one per
    `limits.MAX_CHANNELS` channels).

    Momentum, modes, hooks and `num_batches_tracked` stay the same; pending micro-batches of an unfinished mini-batch
    are dropped. After an exception, all statistics are unchanged.

    Args:
        model: if it is in training mode, its layers in training mode are measured and those in eval mode stay
            frozen; if it is in eval mode, all layers are measured. Other modules, such as dropout, keep their mode.
        loader: yields the batches. If a batch is a tuple or list, the model gets its first element, as in
            `torch.optim.swa_utils.update_bn`.
        num_batches: the largest number of batches.
        progress: called after each batch with the number of finished batches of this member.

    Returns:
        The number of batches of all members; if layers have groups, in the group with the most.

    Raises:
        ValueError: `num_batches` is below 1; the model has no layer to measure, or a lazy one; a batch has one value
            per channel; on all members: no layer got values, or a layer got NaN or infinity.
        TypeError: `num_batches` is not an int.
        StatsdBNError: the exchange failed; RoundMismatch if the members' models differ. With `on_nonfinite="raise"` NaN
            or infinity in a batch raises NonFinite on its member at once, and ReplicaLost on the others.

    Warns:
        UserWarning: a layer was not called on any member, and keeps its statistics.
    """
    if isinstance(num_batches, bool) or not isinstance(num_batches, int | None):
        raise TypeError(f"num_batches: expected an int or None, got {num_batches!r}")
    if num_batches is not None and num_batches < 1:
        raise ValueError(f"num_batches: expected at least 1, got {num_batches}")
    accumulators: Accumulators = {layer: MomentAccumulator() for layer in _running_layers(model)}
    layers = [layer for layer in accumulators if layer.running_mean is not None and layer.running_var is not None]
    _check_layers(layers)
    batches = _run(model, islice(loader, num_batches), accumulators, progress)
    population: Population = {}
    total = 0
    for group in dict.fromkeys(layer.group for layer in layers):  # in the model's order, equal on all members
        own = {layer: accumulators[layer].moments for layer in layers if layer.group == group}
        of_group, count = _over_all_members(own, batches, group)
        population |= of_group
        total = max(total, count)
    measured = {layer: moments for layer, moments in population.items() if moments.count}
    _check_population(measured, total)
    if unused := [layer.layer_name for layer in population if layer not in measured]:
        warn(f"layers {_shown(unused)} were called on no member and keep their statistics")
    _write(measured)
    for layer in measured:
        layer.forget_pending()
    return total


def _running_layers(model: nn.Module) -> list[SynchronizedBatchNorm]:
    """Returns the layers that normalise with batch statistics, also those without running statistics."""
    layers = [module for module in model.modules() if isinstance(module, SynchronizedBatchNorm)]
    # These wrappers are in training mode even around a model in eval mode.
    while isinstance(model, nn.DataParallel | DistributedDataParallel | AveragedModel):
        model = model.module
    return [layer for layer in layers if layer.training or not model.training]


def _check_layers(layers: list[SynchronizedBatchNorm]) -> None:
    if not layers:
        expected = "expected a synchronised layer with running statistics in training mode, got none"
        raise ValueError(wrap(f"model: {expected}; call client.convert_model() and model.train()"))
    if unknown := [layer.layer_name for layer in layers if any(map(is_lazy, layer.buffers()))]:
        got = f"got lazy ones {_shown(unknown)}"
        raise ValueError(wrap(f"model: expected initialised layers, {got}; run one batch through the model first"))


def _run(
    model: nn.Module, batches: Iterable[Any], accumulators: Accumulators, progress: Callable[[int], object] | None
) -> int:
    done = 0
    for done, batch in enumerate(batches, 1):
        with torch.no_grad(), _measuring(model, accumulators), torch.compiler.set_stance("force_eager"):
            try:
                model(batch[0] if isinstance(batch, tuple | list) else batch)
            except ValueError as error:
                error.add_note(f"in batch {done} of recalibrate(), which does not synchronise forward passes")
                raise
        if progress is not None:
            progress(done)
    return done


@contextmanager
def _measuring(model: nn.Module, accumulators: Accumulators) -> Iterator[None]:
    """Makes the layers accumulate in one forward pass only: a loader or `progress` may use the model as well."""
    # Members may have different numbers of batches, so DistributedDataParallel's forward pass must run no collective.
    wrappers: list[Any] = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    before = [(wrapper.require_forward_param_sync, wrapper._join_config) for wrapper in wrappers]  # noqa: SLF001 - below
    try:
        for layer, accumulator in accumulators.items():
            vars(layer)["_accumulator"] = accumulator
        for wrapper in wrappers:
            wrapper.require_forward_param_sync = False
            wrapper._join_config = wrapper._join_config._replace(enable=False)  # noqa: SLF001 - no public name
        yield
    finally:
        for layer in accumulators:
            vars(layer).pop("_accumulator", None)
        for wrapper, (sync, join) in zip(wrappers, before, strict=True):
            wrapper.require_forward_param_sync, wrapper._join_config = sync, join  # noqa: SLF001 - as above


def _over_all_members(
    own: dict[SynchronizedBatchNorm, Moments | None], batches: int, group: GroupSpec
) -> tuple[Population, int]:
    """Sends this member's moments and number of batches; returns the sums over all members of the layers' group."""
    communicator = communicator_for(group)
    if isinstance(communicator, Connection) and not isinstance(group, NamedProcessGroup):
        communicator.rejoin_if_paused(group)
    transport = transport_for(ROUND_NAME, group)
    vectors = [_vectors(layer, moments) for layer, moments in own.items()]
    aggregates = [transport.run_slave(rows) for rows in split_rows(batches, np.concatenate(vectors, axis=1))]
    ends = np.cumsum([each.shape[1] for each in vectors])[:-1]
    totals = np.split(np.concatenate([aggregate.values for aggregate in aggregates], axis=1), ends, axis=1)
    last = aggregates[-1]
    for layer, total in zip(own, totals, strict=True):
        if not (total[3] == last.replicas * _checksum(layer)).all():
            raise RoundMismatch(
                f"{last.key}: expected the same layers on all members, got layer {layer.layer_name!r} with "
                f"{layer.num_features} channels on this one and another elsewhere; build and freeze the same layers on "
                "all members",
                **last.key.fields,
            )
    moments = (Moments.from_vectors(int(total[2, 0]), total) for total in totals)
    return dict(zip(own, moments, strict=True)), last.count


def _vectors(layer: SynchronizedBatchNorm, moments: Moments | None) -> FloatArray:
    """Returns a layer's vectors of Σx, Σx², the count, and a checksum of its name, which detects different layers."""
    moments = moments or Moments.empty(_buffers(layer)[0].numel())
    constants = np.array([[moments.count], [_checksum(layer)]], np.float64)
    return np.concatenate((moments.vectors, np.repeat(constants, len(moments.sums), axis=1)))


def _checksum(layer: SynchronizedBatchNorm) -> float:
    return float(zlib.crc32(layer.layer_name.encode()))


def _buffers(layer: Any) -> tuple[Tensor, Tensor]:  # not None: only layers with running statistics are measured
    return layer.running_mean, layer.running_var


def _check_population(measured: Population, batches: int) -> None:
    """Raises ValueError if there are no values or non-finite ones; all members raise alike."""
    if not measured:
        text = f"loader: expected values for at least one layer, got none in the {batches} batches of all members"
        raise ValueError(wrap(text))
    if bad := [layer.layer_name for layer, moments in measured.items() if not is_finite(moments.vectors)]:
        got = f"got NaN or infinity in layers {_shown(bad)}"
        raise ValueError(wrap(f"loader: expected finite values, {got}; all layers keep their statistics"))


def _shown(names: list[str], most: int = 5) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + rest


def _write(measured: Population) -> None:
    """Writes the statistics into all buffers, or after an exception into none."""
    old: dict[int, tuple[Tensor, Tensor]] = {}  # by address, since layers may share a buffer
    try:
        for layer, moments in measured.items():
            for buffer, values in zip(_buffers(layer), (moments.mean, moments.variance(unbiased=True)), strict=True):
                old.setdefault(buffer.data_ptr(), (buffer, buffer.clone()))
                buffer.copy_(torch.from_numpy(values).to(buffer.dtype))
    except BaseException:
        for buffer, before in old.values():
            buffer.copy_(before)
        raise
