"""Round keys: what identifies one exchange, on every member alike."""

from collections.abc import Iterable
from typing import Any, NamedTuple, Self

from statsd_bn import limits
from statsd_bn.checks import check_integer, check_name, shown
from statsd_bn.errors import ProtocolError

FORWARD = "forward"

# In training, where the layer's input needs no gradient: so no backward round follows.
FORWARD_WITHOUT_GRADIENT = "forward without gradient"
FORWARD_PHASES = (FORWARD, FORWARD_WITHOUT_GRADIENT)

BACKWARD = "backward"
SECOND_BACKWARD = "second backward"

# The rows of such a round are not added but put one behind the other: bytes, eight to a value.
GATHER = "gather"

# The gathers in which the members of a group agree to meet in shared memory are called so.
MEMORY = "statsd_bn memory"


ADVICE = (
    "Run the same layers in the same order on every rank, equally often; "
    "a rank without rows passes an empty (0, C) tensor."
)
ADVICE_FOR_GRADIENTS = (
    "requires_grad of the layer's input differs between these ranks: call requires_grad_() on it on all ranks, or "
    "detach it on all."
)

_new_tuple = tuple.__new__

_NAME, _PHASE, _COUNTER = limits.MAX_NAME_BYTES, limits.MAX_PHASE_BYTES, limits.MAX_COUNTER


class _KeyFields(NamedTuple):
    job: str
    group: str
    epoch: int
    step: int
    layer: str
    call: int
    phase: str


class RoundKey(_KeyFields):
    """What identifies one round, on every member alike; a tuple, because it is compared and looked up all the time.

    Attributes:
        job: the training run.
        group: the members of the job that synchronise together.
        epoch: one life of the group's membership.
        step: counts the training steps of an epoch from 0.
        layer: the layer's name, its place in the model.
        call: counts the layer's forward calls within the step from 0.
        phase: one of `FORWARD_PHASES`, `BACKWARD`, or a longer name for a further exchange of the same call; or
            `GATHER`.
    """

    __slots__ = ()

    def __new__(cls, job: str, group: str, epoch: int, step: int, layer: str, call: int, phase: str) -> Self:
        """Checks what it is made of."""
        check_name("job", job, limits.MAX_NAME_BYTES)
        check_name("group", group, limits.MAX_NAME_BYTES)
        check_integer("epoch", epoch, 0, limits.MAX_COUNTER)
        check_integer("step", step, 0, limits.MAX_COUNTER)
        check_name("layer", layer, limits.MAX_NAME_BYTES)
        check_integer("call", call, 0, limits.MAX_COUNTER)
        check_name("phase", phase, limits.MAX_PHASE_BYTES)
        return tuple.__new__(cls, (job, group, epoch, step, layer, call, phase))

    def __str__(self) -> str:
        return (
            f"job {self.job!r}, group {self.group!r}, epoch {self.epoch}, step {self.step}, "
            f"layer {self.layer!r}, call {self.call}, {self.phase}"
        )

    def in_words(self, *, with_call: bool = True, with_group: bool = False) -> str:
        """Returns where in the model and when a round takes place, for a row of an error's table."""
        call = f", call {self.call}" if with_call else ""
        group = f", group {self.group!r}" if with_group else ""
        return f"{self.phase} of layer {self.layer!r}{call}, step {self.step}{group}"

    def of_phase(self, phase: str) -> Self:
        """Returns the key of another exchange of the same call."""
        check_name("phase", phase, limits.MAX_PHASE_BYTES)
        return tuple.__new__(type(self), (*self[:-1], phase))

    def at(self, step: int, call: int) -> Self:
        """Returns the key of another call of the same layer; step and call are counters of one's own."""
        job, group, epoch, _, layer, _, phase = self
        return tuple.__new__(type(self), (job, group, epoch, step, layer, call, phase))

    @property
    def is_forward(self) -> bool:
        """Whether the round is a layer's forward round."""
        return self.phase in FORWARD_PHASES

    @property
    def fields(self) -> dict[str, Any]:
        """The parts by name, for an error's fields."""
        return self._asdict()


def key_of_frame(packed: bytes, epoch: int, step: int, call: int) -> RoundKey:
    """Returns the key that a frame has: job, group, layer and phase in UTF-8 with a zero byte between two.

    The numbers are unsigned.

    Raises:
        ProtocolError: one of them is out of its limits.
    """
    try:
        texts = packed.decode()
        job, group, layer, phase = texts.split("\0")
    except ValueError as error:
        raise ProtocolError(f"round key: expected job, group, layer and phase in UTF-8, got {shown(packed)}") from error
    # What nearly all keys are is seen at once, since each frame of a round has one.
    if (
        len(packed) <= _NAME
        and len(phase) <= _PHASE
        and texts.isascii()
        and job
        and group
        and layer
        and phase
        and job.isprintable()
        and group.isprintable()
        and layer.isprintable()
        and phase.isprintable()
        and epoch <= _COUNTER
        and step <= _COUNTER
        and call <= _COUNTER
    ):
        return _new_tuple(RoundKey, (job, group, epoch, step, layer, call, phase))
    return RoundKey(job, group, epoch, step, layer, call, phase)


def advice_for(places: Iterable[str]) -> str:
    """Returns what to do about ranks that wait in different rounds, each as `RoundKey.in_words` writes it."""
    found = set(places)
    if len({place.replace(FORWARD_WITHOUT_GRADIENT, FORWARD, 1) for place in found}) < len(found):
        return ADVICE_FOR_GRADIENTS
    return ADVICE


def first_non_finite(key: RoundKey, who: str, what: str, *, has_steps: bool = True) -> str:
    """Returns where values that are not finite have first come from, for a log or a report."""
    step = f", step {key.step}" if has_steps else ""
    phase = FORWARD if key.is_forward else key.phase
    return f"first non-finite: layer {key.layer!r}, {phase}{step}, {who}, {what}"
