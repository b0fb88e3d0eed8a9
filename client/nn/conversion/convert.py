"""convert_model and its inverse: from torch's layers to ours, keeping everything else.

A converted layer is the same object and changes its class, so optimizers, checkpoints and whoever else knows it go on
working.
"""

import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest import mock

from torch import nn
from torch.nn import SyncBatchNorm  # torch's own, also while `patch_sync_batchnorm` replaces it in `torch.nn`
from torch.nn.modules.module import register_module_module_registration_hook

from client.data_parallel.replicate import DataParallelWithCallback
from client.nn import input_checks
from client.nn.conversion.reasons import BOUND, why_left
from client.nn.conversion.report import check_is_module, conversion_report, in_brief, is_unsynchronised, places
from client.nn.micro_batches import check_chunks
from client.nn.synchronized import CONVERSIONS, OWN_ATTRIBUTES, TWINS, Synchronized, conversion_of
from client.session.groups import Group
from client.tracebacks import api_boundary
from client.transports.choose import GroupSpec, resolve_group
from client.transports.named_process_group import NamedProcessGroup, named
from statsd_bn import limits
from statsd_bn.checks import check_name
from statsd_bn.errors import ConfigurationError, ProtocolError

logger = logging.getLogger("statsd_bn.client")

Kinds = dict[type[nn.Module], type[nn.Module]]


@api_boundary
def convert_model(
    module: nn.Module,
    *,
    group: Group | str | None = None,
    chunks: int | None = None,
    process_group: Any = None,
) -> nn.Module:
    """Makes every batch norm of torch's in `module` a synchronised one, and names it by its place.

    That is `nn.BatchNorm1d/2d/3d`, `nn.LazyBatchNorm1d/2d/3d` and `nn.SyncBatchNorm`, at any depth; `nn.DataParallel`
    becomes `DataParallelWithCallback`. A layer used in two places stays one layer, with the name of the first. Names do
    not count the levels of `DataParallel` and `DistributedDataParallel`.

    A subclass keeps its own `forward`; what it hands to `batch_norm` in training is synchronised, see
    `client.synchronized_class`. Classes that compute their statistics themselves are converted as
    `client.register_conversion` was told. A batch norm that cannot be converted is left as it is: because its
    `forward` synchronises by itself, or because it was parametrized, sharded by FSDP or given a `forward` of its own
    before. A `UserWarning` tells of those, and `client.conversion_report(model)` names each. A layer whose `forward`
    comes to no `batch_norm` is named too once it has run in training.

    Args:
        module: any module; containers are changed in place. Layers that are synchronised already are only named.
        group: with whom the layers synchronise: None for the whole job, "local" for the members of this host, or a
            `client.Group`. A synchronised layer that has a group or a process group keeps it.
        chunks: micro-batches per mini-batch, for pipelines and gradient accumulation: the running statistics move once
            per mini-batch, see `SynchronizedBatchNorm`. None leaves layers as they are, which is 1 where they are new.
        process_group: one of torch's, with whose ranks the layers synchronise by its collectives, without a server.
            Without it and `group` an `nn.SyncBatchNorm` keeps the one it has, and layers without any take torch's
            default process group while there is no connection.

    Returns:
        The module. Layers stay the same objects and change their class. Another one comes in place of an
        `nn.DataParallel`, and where a registered conversion makes one.

    Raises:
        ValueError: `group` is neither None, "local" nor a `client.Group`, `process_group` is something else, both
            are given, or `chunks` is below 1; nothing is changed.
        TypeError: `module` is not a module, or `chunks` is neither None nor an int; or a registered conversion gives no
            module: the layers before it are converted then.
        ConfigurationError: a layer's place in the model is not printable, or too long; nothing is changed.
    """
    return convert(module, resolve_group(group, process_group), chunks, stacklevel=4)  # the border's frame is between


def convert(module: nn.Module, group: GroupSpec = None, chunks: int | None = None, *, stacklevel: int) -> nn.Module:
    """`convert_model`; `stacklevel`: as for `warnings.warn`."""
    check_is_module(module)
    if chunks is not None:
        check_chunks(chunks)
    _check_names(module)
    _check_process_groups(module)
    converted = module
    try:
        kept = {part: part for part in input_checks.parts_of(module)}
        converted = _replace(module, _synchronised(), _converted, kept)
    finally:  # a conversion of somebody's own may fail, and layers that are converted by then go on working
        _equip(converted, group, chunks)
    report = conversion_report(converted)
    logger.info("%s", report)
    if report.left:
        warnings.warn(
            f"convert_model left {report.summary_of_left}. client.conversion_report(model) names each",
            stacklevel=stacklevel,
        )
    return converted


def _equip(module: nn.Module, group: GroupSpec, chunks: int | None) -> None:
    """Gives each layer of ours its name, with whom it synchronises, and its micro-batches."""
    for place, layer in places(module):
        if isinstance(layer, Synchronized):
            # A class may refuse attributes that it does not know.
            vars(layer)["layer_name"] = place or type(layer).__name__.removeprefix("Lazy")
            vars(layer)["group"] = _with_whom(layer, group)
            if chunks is not None:
                layer.chunks = chunks


@api_boundary
def revert_model(module: nn.Module) -> nn.Module:
    """Makes every synchronised layer in `module` torch's own again: the inverse of `convert_model`.

    A `DataParallelWithCallback` becomes an `nn.DataParallel`, except where its replicas share a device, which torch's
    cannot. Subclasses of ours, layers that were given a `forward` of their own since and what FSDP has sharded are left
    as they are, and a `UserWarning` names them.
    Micro-batches whose mini-batch has not ended are forgotten; `client.commit_running_statistics(module)` before it
    counts them.

    Args:
        module: any module; containers are changed in place.

    Returns:
        The module, or its replacement if it is itself a `DataParallelWithCallback`.

    Raises:
        TypeError: `module` is not a module.
    """
    return revert(module, stacklevel=4)  # the border's frame is between


def revert(module: nn.Module, *, kept: Iterable[nn.Module] = (), stacklevel: int) -> nn.Module:
    """`revert_model`, but for the layers in `kept`; `stacklevel` is as `convert` takes it."""
    check_is_module(module)
    ours = set(kept)
    reverted = _replace(module, _plain(), _released, {part: part for part in (*ours, *input_checks.parts_of(module))})
    left = {
        place: _described(layer)
        for place, layer in places(reverted)
        if isinstance(layer, Synchronized) and layer not in ours
    }
    if left:
        warnings.warn(
            f"revert_model left as they are, synchronised: {in_brief(left)}. Replace each by hand",
            stacklevel=stacklevel,
        )
    return reverted


@contextmanager
def patch_sync_batchnorm() -> Iterator[None]:
    """While it lasts, torch's batch norms, taken from `torch.nn`, make synchronised layers.

    That is `nn.BatchNorm1d/2d/3d`, `nn.LazyBatchNorm1d/2d/3d` and `nn.SyncBatchNorm`. Torch's own come back whatever
    happens.
    """
    with ExitStack() as stack:
        for torchs, ours in TWINS.items():
            stack.enter_context(mock.patch.object(nn, torchs.__name__, ours))
        yield


# Layers whose registered conversion is at work: it may ask for ours, and gets that.
_in_conversion: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def _synchronised() -> Kinds:
    return {**TWINS, nn.DataParallel: DataParallelWithCallback}


def _plain() -> Kinds:
    return {ours: torchs for torchs, ours in _synchronised().items()}


def _check_names(module: nn.Module) -> None:
    """Check each layer's path in the model now: it is the layer's name on the wire, where errors come too late."""
    for place, layer in places(module):
        if place and (type(layer) in TWINS or isinstance(layer, Synchronized) or _is_adopted(layer)):
            try:
                check_name("the name of a layer, its place in the model", place, limits.MAX_NAME_BYTES)
            except ProtocolError as error:
                raise ConfigurationError(error.message) from None


def _is_adopted(layer: nn.Module) -> bool:
    """Whether a layer will keep its class's `forward`."""
    return is_unsynchronised(layer) and not isinstance(layer, nn.DataParallel) and not why_left(layer)


def _with_whom(layer: Synchronized, group: GroupSpec) -> GroupSpec:
    # What a subclass calls so is its own affair.
    given = None if layer.converted_from else vars(layer).pop("process_group", None)
    process_group = None if given is None else named(given)
    if layer.group is not None or group is not None:
        if process_group:
            layer._process_group_before = process_group
        return group if layer.group is None else layer.group
    return process_group


def _check_process_groups(module: nn.Module) -> None:
    """Check them before anything is changed."""
    for _, layer in places(module):
        if type(layer) is SyncBatchNorm:
            resolve_group(None, layer.process_group)


def _replace(
    module: nn.Module,
    kinds: Kinds,
    otherwise: Callable[[nn.Module], nn.Module],
    replaced: dict[nn.Module, nn.Module],
) -> nn.Module:
    """Converts by exact type; a module that is used in two places stays one module."""
    if module in replaced:
        return replaced[module]
    has_twin = _has_twin(module, kinds)
    new = _as(kinds[type(module)], module) if has_twin else otherwise(module)
    replaced[module] = replaced[new] = new
    if new is not module and not has_twin:
        return new  # what somebody's own conversion returns is as it wants it
    for name, child in new._modules.items():
        if child is not None:
            new._modules[name] = _replace(child, kinds, otherwise, replaced)
    return new


def _has_twin(module: nn.Module, kinds: Kinds) -> bool:
    is_registered = type(module) in CONVERSIONS and module not in _in_conversion
    if type(module) not in kinds or is_registered or any(name in vars(module) for name in BOUND):
        return False
    return not (isinstance(module, DataParallelWithCallback) and module.has_virtual_replicas)


def _converted(module: nn.Module) -> nn.Module:
    """Converts a layer of another class as that is registered."""
    if isinstance(module, Synchronized) or any(name in vars(module) for name in BOUND):
        return module
    convert = conversion_of(type(module))
    if convert is None or module in _in_conversion:
        return module
    _in_conversion.add(module)
    try:
        converted = convert(module)
    finally:
        _in_conversion.discard(module)
    if not isinstance(converted, nn.Module):
        kind = type(module).__qualname__
        raise TypeError(f"the conversion registered for {kind}: expected a module from it, got {converted!r:.80}")
    return converted


def _released(module: nn.Module) -> nn.Module:
    """Gives a layer of an adopted class its own class back."""
    original = vars(type(module)).get("converted_from")  # what is derived from such a class is somebody's own
    # A forward of its own that was put above ours may go on calling it.
    if isinstance(module, Synchronized) and original is not None and "forward" not in vars(module):
        object.__setattr__(module, "__class__", original)
        for name in OWN_ATTRIBUTES:
            vars(module).pop(name, None)
    return module


def _as(kind: type[nn.Module], old: nn.Module) -> nn.Module:
    """Returns a `kind` with the state of `old`; a layer stays the same object, for whoever knows it."""
    new, process_group = old, _process_group_of(old)
    if isinstance(old, nn.DataParallel):
        new = kind.__new__(kind)
        vars(new).update(vars(old))
        _rebind_hooks(old, new)
    else:
        new.__class__ = kind
    for name in (*OWN_ATTRIBUTES, "has_virtual_replicas"):
        vars(new).pop(name, None)
    if isinstance(new, SyncBatchNorm):
        vars(new).setdefault("process_group", process_group)
    return new


def _process_group_of(layer: nn.Module) -> Any:
    """Returns the process group of torch's that a layer of ours has or had; None also where it was destroyed."""
    if not isinstance(layer, Synchronized):
        return None
    group = layer._process_group_before or layer.group
    with suppress(ConfigurationError):
        return group.find() if isinstance(group, NamedProcessGroup) else None
    return None


def _rebind_hooks(old: nn.Module, new: nn.Module) -> None:
    """Hooks before load_state_dict are the only ones that hold their module, weakly: it would be dead."""
    hooks: dict[int, Any] = new._load_state_dict_pre_hooks
    for hook in hooks.values():
        if getattr(hook, "with_module", False) and hook.module() is old:
            hook.module = weakref.ref(new)


def _keep_from_torchs_converter(parent: nn.Module, name: str, module: nn.Module) -> nn.Module | None:
    """Keeps a synchronised layer where `nn.SyncBatchNorm.convert_sync_batchnorm` would put one of torch's.

    Torch calls it for each module that becomes part of another. The converter makes a layer with the same tensors.
    """
    if type(module) is not SyncBatchNorm:
        return None
    old = parent._modules.get(name)
    if not isinstance(old, Synchronized) or any(getattr(old, each) is not getattr(module, each) for each in _TENSORS):
        return None
    warnings.warn(
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm leaves synchronised layers as they are. Leave it out (in "
        "Lightning sync_batchnorm=True), or give it client.revert_model(model)",
        stacklevel=3,
    )
    return old


_TENSORS = ("weight", "bias", "running_mean", "running_var")
register_module_module_registration_hook(_keep_from_torchs_converter)  # type: ignore[arg-type]  # it may return one


def _described(module: nn.Module) -> str:
    bound = any(name in vars(module) for name in BOUND)
    return f"{type(module).__qualname__}{' with its own forward' if bound else ''}"
