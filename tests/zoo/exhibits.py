"""Exhibit: the zoo's result for a family of networks, which one process computes and `tour` prints."""

import gc
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from zoo.catalogue import Survey
from zoo.comparison import Comparison, compare
from zoo.specimen import Unfit, specimens

# The largest difference in float64 that rounding explains.
BAR = 1e-6

# The least difference that an unsynchronised network must show; with a smaller one equality proves nothing.
VISIBLE = 1e-3

# Time limit of a network.
SECONDS = 400


@dataclass(frozen=True)
class Exhibit:
    library: str  # "torchvision" or "timm"
    family: str
    name: str  # its smallest network
    layers: tuple[tuple[str, int], ...] = ()  # batch norms by class
    difference: float | None = None  # the largest; None if not compared
    unsynchronised: float = 0.0  # the difference without synchronisation
    part: str = ""  # the compared part; empty for the whole network
    problem: str = ""  # why it differs or was not compared; empty if equal
    is_unfit: bool = False  # it cannot be compared, even with torch's layers
    seconds: float = 0.0

    def __str__(self) -> str:
        layers = ", ".join(f"{number} {kind}" for kind, number in self.layers)
        part = f" {self.part}" if self.part else ""
        what = "-" if self.difference is None else f"{self.difference:.1e} (alone {self.unsynchronised:.1e})"
        problem = f"  {'CANNOT BE COMPARED' if self.is_unfit else 'DIFFERS'}: {self.problem}" if self.problem else ""
        return f"{self.library:<11} {self.name}{part}: {what}; {layers}; {self.seconds:.0f} s{problem}"


def exhibit(survey: Survey) -> list[Exhibit]:
    who = survey.architecture
    known = {"library": who.library, "family": who.family, "name": who.name}
    if survey.problem:
        return [Exhibit(**known, problem=f"cannot be made: {_first_line(survey.problem)}", is_unfit=True)]
    found: list[Exhibit] = []
    began = time.monotonic()
    try:
        with _at_most(SECONDS):
            for specimen in specimens(who):
                compared = compare(specimen)
                seconds = time.monotonic() - began
                found.append(
                    Exhibit(
                        **known,
                        layers=compared.layers,
                        difference=compared.largest,
                        unsynchronised=compared.unsynchronised,
                        part=specimen.part,
                        problem=_problem(compared),
                        seconds=seconds,
                    )
                )
    except (Unfit, TimeoutError) as error:
        found.append(
            Exhibit(**known, layers=survey.layers, problem=str(error), is_unfit=True, seconds=time.monotonic() - began)
        )
    except Exception as error:  # noqa: BLE001 - the zoo continues
        text = _first_line(f"{type(error).__name__}: {error}")
        found.append(Exhibit(**known, layers=survey.layers, problem=text, seconds=time.monotonic() - began))
    gc.collect()  # modules refer to each other in cycles
    return found or [Exhibit(**known, layers=survey.layers, problem="has no part that takes images", is_unfit=True)]


def _problem(found: Comparison) -> str:
    problems = [f"{kind} {size:.1e}" for kind, size in found.differences.items() if not size <= BAR]
    if found.unsynchronised < VISIBLE:
        problems.append(f"proves nothing: unsynchronised replicas differ by only {found.unsynchronised:.1e}")
    return "; ".join([*problems, *found.complaints])


def _first_line(text: str) -> str:
    return (text.splitlines() or [""])[0][:200]


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    def give_up(*_: object) -> None:
        raise TimeoutError(f"takes longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
