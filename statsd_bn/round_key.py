"""Round keys, which identify a round on all members alike."""

from collections.abc import Iterable
from typing import Any, NamedTuple, Self

from statsd_bn import limits
from statsd_bn.checks import check_integer, check_name

FORWARD = "forward"

# The phase of a layer whose input needs no gradient, in a pass that records gradients: no backward round follows.
FORWARD_WITHOUT_GRADIENT = "forward without gradient"
FORWARD_PHASES = (FORWARD, FORWARD_WITHOUT_GRADIENT)

BACKWARD = "backward"
SECOND_BACKWARD = "second backward"

GATHER = "gather"  # the rows of such a round are concatenated, not added; each value holds eight bytes
MEMORY_GATHER = "statsd_bn memory"  # layer name of the gathers in which a group's members negotiate the transport

ADVICE = (
    "Run the same layers in the same order on every rank, equally often; "
    "a rank without rows passes an empty (0, C) tensor."
)
ADVICE_FOR_GRADIENTS = (
    "requires_grad of the layer's input differs between these ranks: call requires_grad_() on it on all ranks, or "
    "detach it on all."
)

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
    """Key of a round, the same on all members; a tuple, because it is hashed and compared in every round.

    Attributes:
        job: the training run.
        group: the members of the job that synchronise together.
        epoch: one life of the group, until the job restarts.
        step: number of the training step in the epoch, from 0.
        layer: the layer's path in the model.
        call: number of the layer's forward call in the step, from 0.
        phase: one of `FORWARD_PHASES`; `BACKWARD` or `SECOND_BACKWARD`, with a number for further passes; or `GATHER`.
    """

    __slots__ = ()

    def __new__(cls, job: str, group: str, epoch: int, step: int, layer: str, call: int, phase: str) -> Self:
        """Checks the fields."""
        check_name("job", job, _NAME)
        check_name("group", group, _NAME)
        check_integer("epoch", epoch, 0, _COUNTER)
        check_integer("step", step, 0, _COUNTER)
        check_name("layer", layer, _NAME)
        check_integer("call", call, 0, _COUNTER)
        check_name("phase", phase, _PHASE)
        return tuple.__new__(cls, (job, group, epoch, step, layer, call, phase))

    def __str__(self) -> str:
        return (
            f"job {self.job!r}, group {self.group!r}, epoch {self.epoch}, step {self.step}, "
            f"layer {self.layer!r}, call {self.call}, {self.phase}"
        )

    def describe(self, *, with_call: bool = True, with_group: bool = False) -> str:
        """Returns the round's layer, phase and step, for a row of an error's table."""
        call = f", call {self.call}" if with_call else ""
        group = f", group {self.group!r}" if with_group else ""
        return f"{self.phase} of layer {self.layer!r}{call}, step {self.step}{group}"

    def of_phase(self, phase: str) -> Self:
        """Returns the key of another phase of the same call."""
        check_name("phase", phase, limits.MAX_PHASE_BYTES)
        return tuple.__new__(type(self), (*self[:-1], phase))

    def with_call(self, step: int, call: int) -> Self:
        """Returns the key of another call of the same layer, without checking step and call."""
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


def advice_for(places: Iterable[str]) -> str:
    """Returns advice for ranks that wait in different places, given as texts; a round's text contains its key's."""
    rounds = set(places)
    if len({place.replace(FORWARD_WITHOUT_GRADIENT, FORWARD, 1) for place in rounds}) < len(rounds):
        return ADVICE_FOR_GRADIENTS
    return ADVICE


def format_first_non_finite(key: RoundKey, who: str, what: str, *, has_steps: bool = True) -> str:
    """Returns the source of the first non-finite values, for a log or a report."""
    step = f", step {key.step}" if has_steps else ""
    phase = FORWARD if key.is_forward else key.phase
    return f"first non-finite: layer {key.layer!r}, {phase}{step}, {who}, {what}"
