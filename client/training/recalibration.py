"""recalibrate(): the statistics of the whole population, instead of a moving average over the last batches.

Running statistics lag behind the weights, and the last few batches count most. Before an important evaluation a pass
over many batches with fixed weights measures them again ("precise BN": Wu & Johnson, "Rethinking 'Batch' in BatchNorm",
2021, section 3). We average values, not batches: every layer adds up its sums, squares and counts. So batches of any
sizes, spread over the members in any way, give the same result as one process that has them all.
"""

import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
from client.tracebacks import api_boundary
from client.transports.choose import GroupSpec, communicator_for, transport_for
from client.transports.named_process_group import NamedProcessGroup
from statsd_bn import limits
from statsd_bn.error_text import broken
from statsd_bn.errors import RoundMismatch
from statsd_bn.moments import Moments
from statsd_bn.reduction import FloatArray, Rows

# The name of its rounds. No layer has such a name: the name of a module contains no brackets.
TRANSPORT = "recalibrate()"

Accumulators = dict[SynchronizedBatchNorm, MomentAccumulator]
Population = tuple[SynchronizedBatchNorm, Moments]


@api_boundary
def recalibrate(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    num_batches: int | None = None,
    progress: Callable[[int], object] | None = None,
) -> int:
    """Replaces the running statistics by the mean and unbiased variance over all batches of all members.

    All members call it, each with its own batches, of any number and size, even none. The forward pass runs without
    gradients, and each synchronised layer normalises with the statistics of this process's batch. Nothing is sent
    before the last batch; then one message per member and group carries all layers (one for every
    `limits.MAX_CHANNELS` channels).

    Momentum, modes, hooks and `num_batches_tracked` stay as they are; pending micro-batches of an unfinished mini-batch
    are dropped. If anything raises, all statistics stay as they were.

    Args:
        model: in training mode its layers in training mode are measured, and a layer in eval stays frozen; in eval
            mode all are. Other modules run in the mode they are in: in eval there is no dropout.
        loader: gives the batches. If a batch is a tuple or list its first element goes into the model, as in
            `torch.optim.swa_utils.update_bn`.
        num_batches: the most batches to take.
        progress: called after each batch with the number of batches done on this member.

    Returns:
        How many batches there were on all members; where layers have groups, in the group with the most.

    Raises:
        ValueError: `num_batches` is below 1; the model has no layer to measure, or one whose size is not known yet;
            a batch has one value per channel; on every member alike: there were no batches at all, or a layer saw
            NaN or infinity.
        TypeError: `num_batches` is no int.
        StatsdBNError: the exchange failed; RoundMismatch if the members' models differ. With `on_nonfinite="raise"` a
            member whose own batch gives NaN or infinity raises NonFinite at once, and the others ReplicaLost.

    Warns:
        UserWarning: a layer was not called on any member, and keeps its statistics.
    """
    _check_num_batches(num_batches)
    accumulators: Accumulators = {layer: MomentAccumulator() for layer in _layers_that_run(model)}
    kept = [layer for layer in accumulators if layer.running_mean is not None and layer.running_var is not None]
    _check_layers(kept)
    batches = _run(model, islice(loader, num_batches), accumulators, progress)
    shares = [(group, [layer for layer in kept if layer.group == group]) for group in _groups(kept)]
    totals = [_over_all_members(layers, accumulators, batches, group) for group, layers in shares]
    population = [measured for moments, _ in totals for measured in moments]
    total = max(total for _, total in totals)
    measured = [(layer, moments) for layer, moments in population if moments.count]
    _check_population(measured, total)
    _warn_of_idle([layer for layer, moments in population if not moments.count])
    _write([update for layer, moments in measured for update in _updates(layer, moments)])
    for layer, _ in measured:
        layer.forget_pending()
    return total


def _check_num_batches(num_batches: int | None) -> None:
    if num_batches is None:
        return
    if not isinstance(num_batches, int) or isinstance(num_batches, bool):
        raise TypeError(f"num_batches: expected an int or None, got {num_batches!r}")
    if num_batches < 1:
        raise ValueError(f"num_batches: expected at least 1, got {num_batches}")


def _layers_that_run(model: nn.Module) -> list[SynchronizedBatchNorm]:
    """The layers that normalise with batch statistics; those that keep none would otherwise exchange each batch."""
    layers = [module for module in model.modules() if isinstance(module, SynchronizedBatchNorm)]
    training = _unwrapped(model).training
    return [layer for layer in layers if layer.training or not training]


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model itself: a wrapper made after `model.eval()` is in training mode."""
    while isinstance(model, nn.DataParallel | DistributedDataParallel | AveragedModel):
        model = model.module
    return model


def _check_layers(layers: list[SynchronizedBatchNorm]) -> None:
    if not layers:
        raise ValueError(
            broken(
                "model: expected a synchronised layer that keeps running statistics and, in a model in training mode, "
                "is in training mode too; found none (client.convert_model() synchronises a model)"
            )
        )
    if unknown := [layer.layer_name for layer in layers if any(map(is_lazy, layer.buffers()))]:
        raise ValueError(
            broken(
                f"model: expected layers that know their channels, got lazy ones {_shown(unknown)}; run one batch "
                "through the model first"
            )
        )


def _run(
    model: nn.Module, batches: Iterable[Any], accumulators: Accumulators, progress: Callable[[int], object] | None
) -> int:
    """Returns how many batches there were."""
    done = 0
    for done, batch in enumerate(batches, 1):
        with (
            torch.no_grad(),
            _accumulating(accumulators),
            _without_collectives(model),
            torch.compiler.set_stance("force_eager"),
        ):
            _forward(model, batch, done)
        if progress is not None:
            progress(done)
    return done


def _forward(model: nn.Module, batch: Any, number: int) -> None:
    try:
        model(batch[0] if isinstance(batch, tuple | list) else batch)
    except ValueError as error:
        error.add_note(f"in batch {number} of recalibrate(), where the batch of this process alone is the whole batch")
        raise


@contextmanager
def _accumulating(accumulators: Accumulators) -> Iterator[None]:
    """Only a forward pass is counted: a loader or a progress report may use the model for other things."""
    try:
        for layer, accumulator in accumulators.items():
            vars(layer)["_accumulator"] = accumulator
        yield
    finally:
        for layer in accumulators:
            vars(layer).pop("_accumulator", None)


@contextmanager
def _without_collectives(model: nn.Module) -> Iterator[None]:
    """DistributedDataParallel would wait in a forward pass for members with fewer batches.

    It sends its buffers there; and after a `Join`, which leaves this on, it asks who has data left.
    """
    wrappers: list[Any] = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    before = [(wrapper.require_forward_param_sync, wrapper._join_config) for wrapper in wrappers]  # noqa: SLF001 - below
    try:
        for wrapper in wrappers:
            wrapper.require_forward_param_sync = False
            wrapper._join_config = wrapper._join_config._replace(enable=False)  # noqa: SLF001 - torch has no other way
        yield
    finally:
        for wrapper, (sync, join) in zip(wrappers, before, strict=True):
            wrapper.require_forward_param_sync, wrapper._join_config = sync, join  # noqa: SLF001 - as above


@dataclass(frozen=True, slots=True)
class _Share:
    """One layer's part of the message.

    Four vectors of length C: Σx, Σx², the count, and the number its name gives, by which the members see that they
    mean the same layer. The integers are exact, since float64 holds them below 2^53.
    """

    layer: SynchronizedBatchNorm
    moments: Moments

    @property
    def vectors(self) -> FloatArray:
        channels = len(self.moments.sums)
        return np.stack(
            [
                self.moments.sums,
                self.moments.squares,
                np.full(channels, float(self.moments.count)),
                np.full(channels, self.number),
            ]
        )

    @property
    def number(self) -> float:
        return float(zlib.crc32(self.layer.layer_name.encode()))


def _width(layer: SynchronizedBatchNorm) -> int:
    """How many statistics a layer keeps, which may be several for each channel."""
    return layer.num_features if layer.running_mean is None else layer.running_mean.numel()


def _groups(layers: list[SynchronizedBatchNorm]) -> list[GroupSpec]:
    """Returns the layers' groups, each once, in the order of the model, which is the same on all members."""
    return list(dict.fromkeys(layer.group for layer in layers))


def _over_all_members(
    layers: list[SynchronizedBatchNorm], accumulators: Accumulators, batches: int, group: GroupSpec
) -> tuple[list[Population], int]:
    """Exchanges this member's moments and number of batches for those of all members of the layers' group."""
    shares = [_Share(layer, accumulators[layer].moments or Moments.empty(_width(layer))) for layer in layers]
    vectors = np.concatenate([share.vectors for share in shares], axis=1)
    communicator = communicator_for(group)
    if isinstance(communicator, Connection) and not isinstance(group, NamedProcessGroup):
        communicator.end_absence(group)
    transport = transport_for(TRANSPORT, group)
    aggregates = [transport.run_slave(Rows((batches,), part[None])) for part in _parts(vectors)]
    ends = np.cumsum([_width(layer) for layer in layers])[:-1]
    totals = np.split(np.concatenate([aggregate.values for aggregate in aggregates], axis=1), ends, axis=1)
    last = aggregates[-1]
    for share, total in zip(shares, totals, strict=True):
        if not (total[3] == last.replicas * share.number).all():
            raise RoundMismatch(
                f"{last.key}: expected all members to recalibrate layer {share.layer.layer_name!r} of "
                f"{share.layer.num_features} channels at this place of the model; some have another there, or have "
                "frozen another",
                **last.key.fields,
            )
    moments = [Moments.from_vectors(int(total[2, 0]), total) for total in totals]
    return list(zip(layers, moments, strict=True)), last.count


def _parts(vectors: FloatArray) -> list[FloatArray]:
    """As few parts as one message each can carry."""
    return np.split(vectors, range(limits.MAX_CHANNELS, vectors.shape[1], limits.MAX_CHANNELS), axis=1)


def _check_population(measured: list[Population], batches: int) -> None:
    """All members have the same numbers and come to the same end."""
    if not measured:
        raise ValueError(
            broken(f"loader: expected values for at least one layer, got none in the {batches} batches of all members")
        )
    spoilt = [layer.layer_name for layer, moments in measured if not np.isfinite(moments.vectors).all()]
    if spoilt:
        raise ValueError(
            broken(
                f"loader: expected finite values, got NaN or infinity in layers {_shown(spoilt)}; all layers keep the "
                "statistics they had"
            )
        )


def _warn_of_idle(layers: list[SynchronizedBatchNorm]) -> None:
    if layers:
        warnings.warn(
            f"layers {_shown([layer.layer_name for layer in layers])} were called on no member and keep their "
            "statistics",
            stacklevel=4,  # the border's frame is between
        )


def _shown(names: list[str], most: int = 5) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + rest


def _updates(layer: SynchronizedBatchNorm, moments: Moments) -> Iterator[tuple[Tensor, Tensor]]:
    """The layer's buffers, each of shape (C,), and what they shall hold."""
    for buffer, values in (
        (layer.running_mean, moments.mean),
        (layer.running_var, moments.variance(unbiased=True)),
    ):
        assert buffer is not None  # noqa: S101 - only layers with running statistics are measured
        yield buffer, torch.from_numpy(values).to(buffer.dtype).to(buffer.device)


def _write(updates: list[tuple[Tensor, Tensor]]) -> None:
    """Writes all or none."""
    old: list[tuple[Tensor, Tensor]] = []
    try:
        for buffer, values in updates:
            old.append((buffer, buffer.clone()))
            buffer.copy_(values)
    except BaseException:
        for buffer, values in old:
            buffer.copy_(values)
        raise
