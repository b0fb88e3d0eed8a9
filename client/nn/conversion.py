"""convert_model and revert_model: exchange the classes of torch's layers for ours and back."""

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
from client.nn.conversion_report import (
    check_is_module,
    conversion_report,
    has_own_forward,
    layers,
    named_modules,
    summarize,
)
from client.nn.layer import CONVERSIONS, OWN_ATTRIBUTES, REPLACEMENTS, SynchronizedLayer, conversion_of
from client.nn.running_stats import check_chunks
from client.session.groups import Group
from client.tracebacks import api_boundary
from client.transports.choose import GroupSpec, resolve_group
from client.transports.named_process_group import NamedProcessGroup, named
from statsd_bn import limits
from statsd_bn.checks import check_name
from statsd_bn.errors import ConfigurationError, ProtocolError

logger = logging.getLogger("statsd_bn.client")

Classes = dict[type[nn.Module], type[nn.Module]]


@api_boundary
def convert_model(
    module: nn.Module,
    *,
    group: Group | str | None = None,
    chunks: int | None = None,
    process_group: Any = None,
) -> nn.Module:
    """Synchronise every batch norm of torch in `module`, and name it by its path.

    Converts `nn.BatchNorm1d/2d/3d`, `nn.LazyBatchNorm1d/2d/3d` and `nn.SyncBatchNorm` at any depth. `nn.DataParallel`
    becomes `DataParallelWithCallback`. A layer that is used in two places stays one layer, with the name of the first.
    Names omit the levels of `DataParallel` and `DistributedDataParallel`.

    A subclass keeps its own `forward`, and its calls of `batch_norm` in training are synchronised. A class that
    computes its statistics itself needs a conversion, see `client.register_conversion`. A batch norm is left unchanged
    if its `forward` synchronises already or was replaced, or if it was parametrized or sharded by FSDP before. A
    `UserWarning` summarises these layers, and `client.conversion_report(model)` lists each; after a step in training
    also those that did not call `batch_norm`.

    Args:
        module: any module; containers are changed in place. Layers that are synchronised already are only renamed.
        group: ranks that the layers synchronise with: None for the whole job, "local" for the members of this host, or
            a `client.Group`. A synchronised layer that has a group or a process group keeps it.
        chunks: micro-batches per mini-batch, for pipelines and gradient accumulation. The running statistics are
            updated once per mini-batch, see `SynchronizedBatchNorm`. None keeps the layers' value, 1 in new layers.
        process_group: torch's process group to synchronise with by its collectives, without a server. If neither it nor
            `group` is set, an `nn.SyncBatchNorm` keeps its own, and the other layers use torch's default process group
            while there is no connection.

    Returns:
        The module. Layers stay the same objects and change their class. An `nn.DataParallel` is replaced by a new
        object, and registered conversions may replace modules too.

    Raises:
        ValueError: `group`, `process_group` or `chunks` is invalid, or both `group` and `process_group` are set.
        TypeError: `module` is not a module, or `chunks` is neither None nor an int. Or a registered conversion returns
            no module, after earlier layers were converted; otherwise nothing is changed.
        ConfigurationError: a layer's path is not printable, or too long.
    """
    return convert(module, resolve_group(group, process_group), chunks, stacklevel=4)  # api_boundary adds a frame


def convert(module: nn.Module, group: GroupSpec = None, chunks: int | None = None, *, stacklevel: int) -> nn.Module:
    """Implement `convert_model`; `stacklevel` is passed to `warnings.warn`."""
    check_is_module(module)
    if chunks is not None:
        check_chunks(chunks)
    _check_names(module)
    for _, layer in named_modules(module):
        if type(layer) is SyncBatchNorm:
            resolve_group(None, layer.process_group)  # raises before anything is changed
    converted = module
    try:
        sharded = {part: part for part in input_checks.sharded_modules(module)}
        converted = _replace(module, _synchronised_classes(), _convert_registered, sharded)
    finally:  # if a registered conversion fails, the layers converted so far must work
        _set_options(converted, group, chunks)
    report = conversion_report(converted)
    logger.info("%s", report)
    if report.left:
        warnings.warn(
            f"convert_model left {report.summary_of_left}. client.conversion_report(model) lists each with its reason",
            stacklevel=stacklevel,
        )
    return converted


def _set_options(module: nn.Module, group: GroupSpec, chunks: int | None) -> None:
    for path, layer in named_modules(module):
        if isinstance(layer, SynchronizedLayer):
            # Not by setattr: a class may refuse unknown attributes.
            vars(layer)["layer_name"] = path or type(layer).__name__.removeprefix("Lazy")
            vars(layer)["group"] = _group_for(layer, group)
            if chunks is not None:
                layer.chunks = chunks


@api_boundary
def revert_model(module: nn.Module) -> nn.Module:
    """Make every synchronised layer in `module` torch's own again: the inverse of `convert_model`.

    A `DataParallelWithCallback` becomes an `nn.DataParallel`, unless its replicas share a device, which torch does not
    support. Users' subclasses of our classes, layers with a replaced `forward`, and modules that FSDP has sharded are
    left unchanged; a `UserWarning` names them. Micro-batches of an unfinished mini-batch are dropped, unless
    `client.commit_running_statistics(module)` is called before.

    Args:
        module: any module; containers are changed in place.

    Returns:
        The module, or its replacement if it is itself a `DataParallelWithCallback`.

    Raises:
        TypeError: `module` is not a module.
    """
    return revert(module, stacklevel=4)  # api_boundary adds a frame


def revert(module: nn.Module, *, exclude: Iterable[nn.Module] = (), stacklevel: int) -> nn.Module:
    """Implement `revert_model`, except for the layers in `exclude`; `stacklevel` is passed to `warnings.warn`."""
    check_is_module(module)
    exclude = set(exclude)
    unchanged = {part: part for part in (*exclude, *input_checks.sharded_modules(module))}
    torchs = {replacement: original for original, replacement in _synchronised_classes().items()}
    reverted = _replace(module, torchs, _restore_class, unchanged)
    left = {
        path: f"{type(layer).__qualname__}{' with its own forward' if has_own_forward(layer) else ''}"
        for path, layer in named_modules(reverted)
        if isinstance(layer, SynchronizedLayer) and layer not in exclude
    }
    if left:
        warnings.warn(
            f"revert_model left {layers(len(left))} synchronised: {summarize(left)}. Replace each by hand",
            stacklevel=stacklevel,
        )
    return reverted


@contextmanager
def patch_sync_batchnorm() -> Iterator[None]:
    """Replace torch's batch norms in `torch.nn`, lazy ones and `SyncBatchNorm` too, until the context ends."""
    with ExitStack() as stack:
        for original, replacement in REPLACEMENTS.items():
            stack.enter_context(mock.patch.object(nn, original.__name__, replacement))
        yield


# Layers whose registered conversion runs now: if it calls `convert_model`, that must not run it again.
_in_conversion: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def _synchronised_classes() -> Classes:
    return {**REPLACEMENTS, nn.DataParallel: DataParallelWithCallback}


def _check_names(module: nn.Module) -> None:
    """Check each layer's path, its name on the wire, before the first round."""
    for path, layer in named_modules(module):
        if path and isinstance(layer, nn.modules.batchnorm._BatchNorm):
            try:
                check_name("the name of a layer, its place in the model", path, limits.MAX_NAME_BYTES)
            except ProtocolError as error:
                raise ConfigurationError(error.message) from None


def _group_for(layer: SynchronizedLayer, group: GroupSpec) -> GroupSpec:
    # A converted subclass may use the name `process_group` for something else.
    torch_group = None if layer.converted_from else vars(layer).pop("process_group", None)
    process_group = None if torch_group is None else named(torch_group)
    if layer.group is not None or group is not None:
        if process_group:
            layer._process_group_before = process_group
        return group if layer.group is None else layer.group
    return process_group


def _replace(
    module: nn.Module,
    classes: Classes,
    convert_other: Callable[[nn.Module], nn.Module],
    replaced: dict[nn.Module, nn.Module],
) -> nn.Module:
    """Replace modules by exact type, and others by `convert_other`; a shared module stays shared."""
    if module in replaced:
        return replaced[module]
    is_registered = type(module) in CONVERSIONS and module not in _in_conversion
    has_class = type(module) in classes and not (is_registered or has_own_forward(module) or _is_virtual(module))
    new = _with_class(classes[type(module)], module) if has_class else convert_other(module)
    replaced[module] = replaced[new] = new
    if new is not module and not has_class:
        return new  # the result of a registered conversion is final
    for name, child in new._modules.items():
        if child is not None:
            new._modules[name] = _replace(child, classes, convert_other, replaced)
    return new


def _is_virtual(module: nn.Module) -> bool:
    return isinstance(module, DataParallelWithCallback) and module.has_virtual_replicas


def _convert_registered(module: nn.Module) -> nn.Module:
    """Convert a module by the registered conversion of its class, if there is one."""
    if isinstance(module, SynchronizedLayer) or has_own_forward(module):
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
        cls = type(module).__qualname__
        raise TypeError(f"the conversion registered for {cls} returned {converted!r:.80}, expected a module")
    return converted


def _restore_class(module: nn.Module) -> nn.Module:
    """Restore the original class of a converted subclass."""
    original = vars(type(module)).get("converted_from")  # not inherited: users' subclasses of the new class stay
    # A `forward` that was set on the instance after its conversion may call ours.
    if isinstance(module, SynchronizedLayer) and original is not None and "forward" not in vars(module):
        object.__setattr__(module, "__class__", original)
        for name in OWN_ATTRIBUTES:
            vars(module).pop(name, None)
    return module


def _with_class(cls: type[nn.Module], old: nn.Module) -> nn.Module:
    """Return a module with another class: layers are changed in place, DataParallel is replaced."""
    new, process_group = old, _process_group_of(old)
    if isinstance(old, nn.DataParallel):
        new = cls.__new__(cls)
        vars(new).update(vars(old))
        hooks: dict[int, Any] = new._load_state_dict_pre_hooks  # unlike other hooks they may refer to their module
        for hook in hooks.values():
            if getattr(hook, "with_module", False) and hook.module() is old:
                hook.module = weakref.ref(new)
    else:
        new.__class__ = cls
    for name in (*OWN_ATTRIBUTES, "has_virtual_replicas"):
        vars(new).pop(name, None)
    if isinstance(new, SyncBatchNorm):
        vars(new).setdefault("process_group", process_group)
    return new


def _process_group_of(layer: nn.Module) -> Any:
    """The torch process group of a synchronised layer, present or former; None if it was destroyed."""
    group = (layer._process_group_before or layer.group) if isinstance(layer, SynchronizedLayer) else None
    with suppress(ConfigurationError):
        return group.find() if isinstance(group, NamedProcessGroup) else None
    return None


def _keep_from_torchs_converter(parent: nn.Module, name: str, module: nn.Module) -> nn.Module | None:
    """Keep a synchronised layer that `nn.SyncBatchNorm.convert_sync_batchnorm` would replace by one of torch's.

    Torch calls this hook when a module gets a child. The converter's new layer has the old layer's tensors.
    """
    if type(module) is not SyncBatchNorm:
        return None
    old = parent._modules.get(name)
    tensors = ("weight", "bias", "running_mean", "running_var")
    if not isinstance(old, SynchronizedLayer) or any(
        getattr(old, each) is not getattr(module, each) for each in tensors
    ):
        return None
    warnings.warn(
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm does not convert synchronised layers. Remove the call (in "
        "Lightning sync_batchnorm=True), or call it on client.revert_model(model)",
        stacklevel=3,
    )
    return old


register_module_module_registration_hook(_keep_from_torchs_converter)  # type: ignore[arg-type]  # it may return one
