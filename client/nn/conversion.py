"""convert_model and revert_model: exchange the classes of torch's layers for ours and back, and report the result."""

import logging
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import nn
from torch.nn import SyncBatchNorm  # torch's own, also while `patch_sync_batchnorm` replaces it in `torch.nn`
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_module_registration_hook

from client.data_parallel.replicate import DataParallelWithCallback
from client.nn import batchnorm, input_checks
from client.nn.batchnorm import OWN_ATTRIBUTES, SynchronizedBatchNorm
from client.nn.running_stats import check_chunks
from client.nn.subclasses import bypasses_ours, convert_subclass, has_own_forward, reason_not_synchronised
from client.session.groups import Group
from client.tracebacks import api_boundary, warn
from client.transports.choose import GroupSpec, resolve_group
from client.transports.process_group import NamedProcessGroup, named
from statsd_bn import limits
from statsd_bn.checks import check_name
from statsd_bn.errors import ConfigurationError, ProtocolError

logger = logging.getLogger("statsd_bn.client")

Classes = dict[type[nn.Module], type[nn.Module]]
Conversion = Callable[[nn.Module], nn.Module]

# The synchronised class of each of torch's batch norms.
REPLACEMENTS: Classes = {
    SyncBatchNorm: SynchronizedBatchNorm,
    nn.BatchNorm1d: batchnorm.SynchronizedBatchNorm1d,
    nn.BatchNorm2d: batchnorm.SynchronizedBatchNorm2d,
    nn.BatchNorm3d: batchnorm.SynchronizedBatchNorm3d,
    nn.LazyBatchNorm1d: batchnorm.LazySynchronizedBatchNorm1d,
    nn.LazyBatchNorm2d: batchnorm.LazySynchronizedBatchNorm2d,
    nn.LazyBatchNorm3d: batchnorm.LazySynchronizedBatchNorm3d,
}
_CLASSES: Classes = {**REPLACEMENTS, nn.DataParallel: DataParallelWithCallback}

# The conversion of each other class; subclasses without an entry inherit it.
CONVERSIONS: dict[type[nn.Module], Conversion] = {_BatchNorm: convert_subclass}

# Layers whose registered conversion is running: a nested `convert_model` must not run it again.
_in_conversion: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()

_MAX_CLASSES = 4  # in a summary; the report lists all layers


@api_boundary
def convert_model(
    module: nn.Module, *, group: Group | str | None = None, chunks: int | None = None, process_group: Any = None
) -> nn.Module:
    """Synchronise every batch norm of torch in `module`, and name it by its path.

    Converts `nn.BatchNorm1d/2d/3d`, `nn.LazyBatchNorm1d/2d/3d` and `nn.SyncBatchNorm` at any depth. `nn.DataParallel`
    becomes `DataParallelWithCallback`. A layer that is used in two places stays one layer, with the name of the first.
    Names omit the levels of `DataParallel` and `DistributedDataParallel`.

    A subclass keeps its own `forward`, and its calls of `batch_norm` in training are synchronised. A class that
    computes its statistics itself needs a conversion, see `client.register_conversion`. A batch norm is left unchanged
    if its `forward` synchronises already or was replaced, or if it was parametrized or sharded by FSDP before. A
    `UserWarning` summarises these layers, and `client.conversion_report(model)` lists each. After a training step the
    report also lists layers that did not call `batch_norm`.

    Args:
        module: any module; containers are changed in place. In layers that are synchronised already, only the name,
            `chunks` and an unset group change.
        group: ranks that the layers synchronise with: None for the whole job, "local" for the members of this host, or
            a `client.Group`. A synchronised layer that has a group or a process group keeps it.
        chunks: micro-batches per mini-batch, for pipelines and gradient accumulation. The running statistics are
            updated once per mini-batch, see `SynchronizedBatchNorm`. None keeps the layers' value, 1 in new layers.
        process_group: torch process group whose collectives synchronise the layers, without a server. If neither it nor
            `group` is set, an `nn.SyncBatchNorm` keeps its own, and the other layers use torch's default process group
            while there is no connection.

    Returns:
        The module. Layers stay the same objects and change their class. An `nn.DataParallel` is replaced by a new
        object, and registered conversions may replace modules too.

    Raises:
        ValueError: `group`, `process_group` or `chunks` is invalid, or both `group` and `process_group` are set.
        TypeError: `module` is not a module, `chunks` is neither None nor an int, or a registered conversion returns no
            module. In the last case earlier layers stay converted; the other errors change nothing.
        ConfigurationError: a layer's path is not printable, or too long.
    """
    resolved = resolve_group(group, process_group)
    check_is_module(module)
    if chunks is not None:
        check_chunks(chunks)
    sharded = {part: part for part in input_checks.sharded_modules(module)}
    for path, layer in named_modules(module):  # these checks raise before anything is changed
        if path and (isinstance(layer, SynchronizedBatchNorm) or (layer not in sharded and _is_convertible(layer))):
            try:  # the path is the layer's name on the wire
                check_name("the name of a layer, its place in the model", path, limits.MAX_NAME_BYTES)
            except ProtocolError as error:
                raise ConfigurationError(error.message) from None
        if type(layer) is SyncBatchNorm:
            resolve_group(None, layer.process_group)
    converted = module
    try:
        converted = _replace(module, _CLASSES, _convert_registered, sharded)
    finally:  # if a registered conversion fails, the layers converted so far must work
        for path, layer in named_modules(converted):
            if isinstance(layer, SynchronizedBatchNorm):
                # Not by setattr: a class may refuse unknown attributes.
                vars(layer)["layer_name"] = path or type(layer).__name__.removeprefix("Lazy")
                vars(layer)["group"] = _group_for(layer, resolved)
                if chunks is not None:
                    layer.chunks = chunks
    report = conversion_report(converted)
    logger.info("%s", report)
    if report.left:
        warn(f"convert_model left {report.summary_of_left}. client.conversion_report(model) lists each with its reason")
    return converted


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
    return revert(module)


def revert(module: nn.Module, exclude: Iterable[nn.Module] = ()) -> nn.Module:
    """Implement `revert_model`, except for the layers in `exclude`."""
    check_is_module(module)
    exclude = set(exclude)
    unchanged = {part: part for part in (*exclude, *input_checks.sharded_modules(module))}
    torchs = {replacement: original for original, replacement in _CLASSES.items()}
    reverted = _replace(module, torchs, _restore_class, unchanged)
    left = {
        path: f"{type(layer).__qualname__}{' with its own forward' if has_own_forward(layer) else ''}"
        for path, layer in named_modules(reverted)
        if isinstance(layer, SynchronizedBatchNorm) and layer not in exclude
    }
    if left:
        warn(f"revert_model left {layers(len(left))} synchronised: {summarize(left)}. Replace each by hand")
    return reverted


@dataclass(frozen=True)
class ConversionReport:
    """Result of `client.convert_model`.

    Attributes:
        synchronised: class of each synchronised layer, by its path in the model. For a converted subclass it is the
            original class.
        left: class and reason of each batch norm or DataParallel that is not synchronised, by its path in the model.
    """

    synchronised: dict[str, str]
    left: dict[str, tuple[str, str]]

    def __str__(self) -> str:
        text = f"synchronised {layers(len(self.synchronised))}"
        classes = Counter(self.synchronised.values())
        if classes:
            text += f" ({', '.join(f'{number} {name}' for name, number in classes.most_common())})"
        return f"{text}; left {self.summary_of_left}" if self.left else text

    @property
    def summary_of_left(self) -> str:
        """Unsynchronised layers by class, with the first of each: `2 layers unsynchronised: 'norm' (MyNorm: ...)`."""
        descriptions = {path: f"{name}: {reason}" for path, (name, reason) in self.left.items()}
        return f"{layers(len(self.left))} unsynchronised: {summarize(descriptions)}"


def conversion_report(model: nn.Module) -> ConversionReport:
    """Report the synchronised and the unsynchronised layers of a model, with the reasons.

    Args:
        model: any module, converted or not.

    Raises:
        TypeError: `model` is not a module.
    """
    check_is_module(model)
    sharded = set(input_checks.sharded_modules(model))
    synchronised: dict[str, str] = {}
    left: dict[str, tuple[str, str]] = {}
    for path, module in named_modules(model):
        if isinstance(module, SynchronizedBatchNorm):
            name = (module.converted_from or type(module)).__qualname__
            if module._bypassed:
                left[path] = (name, "its forward did not call batch_norm in training")
            elif bypasses_ours(type(module)):
                remedy = "call super().forward, or derive it from torch's class"
                left[path] = (name, f"its forward calls torch's batch norm directly; {remedy}")
            else:
                synchronised[path] = name
        elif is_unsynchronised(module):
            if module in sharded:
                reason = "sharded by FSDP; convert the model first"
            elif type(module) in REPLACEMENTS and not has_own_forward(module):
                reason = ""  # torch's own class: nothing prevents the conversion
            else:
                reason = reason_not_synchronised(module)
            left[path] = (type(module).__qualname__, reason or "not converted")
    return ConversionReport(synchronised, left)


def check_is_module(model: Any) -> None:
    """Raise TypeError unless `model` is a module, not a class or a list of modules."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a module, got {model!r:.80}")


def named_modules(
    module: nn.Module, path: str = "", seen: set[nn.Module] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """Like `nn.Module.named_modules`, but paths omit the levels of DataParallel and DistributedDataParallel."""
    seen = set() if seen is None else seen
    if module in seen:
        return
    seen.add(module)
    yield path, module
    is_wrapper = isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel))
    for name, child in module._modules.items():  # a wrapper may hide its children from `named_children`
        if child is not None:
            inner = path if is_wrapper and name == "module" else f"{path}.{name}" if path else name
            yield from named_modules(child, inner, seen)


def layers(number: int) -> str:
    """Return "1 layer" or "n layers"."""
    return "1 layer" if number == 1 else f"{number} layers"


def summarize(descriptions: dict[str, str]) -> str:
    """Give each description with its first path and the number of its other layers; the keys are paths."""
    paths: dict[str, list[str]] = {}
    for path, description in descriptions.items():
        paths.setdefault(description, []).append(path)
    parts = []
    for description, (path, *more) in list(paths.items())[:_MAX_CLASSES]:
        parts.append(f"{path!r} ({description})" + (f" and {len(more)} more of its class" if more else ""))
    if others := list(paths.values())[_MAX_CLASSES:]:
        parts.append(f"{layers(sum(map(len, others)))} of {len(others)} more classes")
    return ", ".join(parts)


def is_unsynchronised(module: nn.Module) -> bool:
    """Whether a module is an unconverted batch norm or DataParallel of torch."""
    if isinstance(module, nn.DataParallel):
        # patch_replication_callback sets `replicate` on the instance
        return not isinstance(module, DataParallelWithCallback) and "replicate" not in vars(module)
    return isinstance(module, _BatchNorm) and not isinstance(module, SynchronizedBatchNorm)


def register_conversion(original: type[nn.Module], convert: Conversion) -> None:
    """Register how `client.convert_model` converts the layers of a class.

    Subclasses of torch's batch norms rarely need this: `convert_model` keeps their `forward` and synchronises its calls
    of `batch_norm`. Register a conversion for a class that computes its statistics itself. For example, detectron2's
    NaiveSyncBatchNorm only adds a `forward` to torch's layer. So restore torch's class and convert the result:

        def without_its_own_collectives(layer: NaiveSyncBatchNorm) -> nn.Module:
            layer.__class__ = nn.BatchNorm2d
            return client.convert_model(layer)

        client.register_conversion(NaiveSyncBatchNorm, without_its_own_collectives)

    `client.revert_model` restores torch's class, not the registered one.

    Args:
        original: the class; the conversion also applies to subclasses for which none is registered.
        convert: takes a layer and returns the module that replaces it, which may be the same one. A different module
            is used unchanged, with all its children. Keep the parameters: an optimizer may already hold them.

    Raises:
        TypeError: `original` is not a class of modules, or `convert` is not callable.
    """
    if not (isinstance(original, type) and issubclass(original, nn.Module)):
        raise TypeError(f"original: expected a subclass of nn.Module, got {original!r:.80}")
    if not callable(convert):
        raise TypeError(f"convert: expected a function of a layer, got {convert!r:.80}")
    CONVERSIONS[original] = convert


def conversion_of(cls: type[nn.Module]) -> Conversion | None:
    """The registered conversion of a class, or None."""
    return next((CONVERSIONS[base] for base in cls.__mro__ if base in CONVERSIONS), None)


def _convert_sync_batchnorm(module: nn.Module, process_group: Any = None) -> nn.Module:
    """`convert_model` under torch's name, as a static method of all synchronised layers; same errors."""
    return convert_model(module, process_group=process_group)


SynchronizedBatchNorm.convert_sync_batchnorm = staticmethod(_convert_sync_batchnorm)


@contextmanager
def patch_sync_batchnorm() -> Iterator[None]:
    """Replace torch's batch norms in `torch.nn`, lazy ones and `SyncBatchNorm` too, until the context ends."""
    replacements: dict[str, Any] = {original.__name__: replacement for original, replacement in REPLACEMENTS.items()}
    with mock.patch.multiple(nn, **replacements):
        yield


def _is_convertible(layer: nn.Module) -> bool:
    """Whether a batch norm of torch will be converted."""
    cls = type(layer)
    if not isinstance(layer, _BatchNorm) or has_own_forward(layer):
        return False
    return cls in REPLACEMENTS or conversion_of(cls) is not convert_subclass or not reason_not_synchronised(layer)


def _group_for(layer: SynchronizedBatchNorm, group: GroupSpec) -> GroupSpec:
    # A converted subclass may use the name `process_group` for something else.
    torch_group = None if layer.converted_from else vars(layer).pop("process_group", None)
    process_group = None if torch_group is None else named(torch_group)
    if layer.group is None and group is None:
        return process_group
    if process_group:
        layer._process_group_before = process_group
    return group if layer.group is None else layer.group


def _replace(
    module: nn.Module, classes: Classes, convert_other: Conversion, replaced: dict[nn.Module, nn.Module]
) -> nn.Module:
    """Convert modules of the exact types in `classes`, and others by `convert_other`; a shared module stays shared."""
    if module in replaced:
        return replaced[module]
    is_registered = type(module) in CONVERSIONS and module not in _in_conversion
    is_virtual = getattr(module, "has_virtual_replicas", False)  # of a DataParallelWithCallback
    has_class = type(module) in classes and not (is_registered or has_own_forward(module) or is_virtual)
    new = _with_class(classes[type(module)], module) if has_class else convert_other(module)
    replaced[module] = replaced[new] = new
    if new is not module and not has_class:
        return new  # the result of a registered conversion is final
    for name, child in new._modules.items():
        if child is not None:
            new._modules[name] = _replace(child, classes, convert_other, replaced)
    return new


def _convert_registered(module: nn.Module) -> nn.Module:
    """Convert a module by the registered conversion of its class, if there is one."""
    convert = conversion_of(type(module))
    is_excluded = isinstance(module, SynchronizedBatchNorm) or has_own_forward(module) or module in _in_conversion
    if convert is None or is_excluded:
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
    original = vars(type(module)).get("converted_from")  # not inherited: users' subclasses of generated classes stay
    # A `forward` that was set on the instance after its conversion may call ours.
    if isinstance(module, SynchronizedBatchNorm) and original is not None and "forward" not in vars(module):
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
    group = (layer._process_group_before or layer.group) if isinstance(layer, SynchronizedBatchNorm) else None
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
    if not isinstance(old, SynchronizedBatchNorm) or any(
        getattr(old, each) is not getattr(module, each) for each in tensors
    ):
        return None
    warnings.warn(
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm does not convert synchronised layers. Remove the call (in "
        "Lightning sync_batchnorm=True), or call it on client.revert_model(model)",
        stacklevel=3,
    )
    return old


register_module_module_registration_hook(_keep_from_torchs_converter)  # type: ignore[arg-type]  # lacks the result
