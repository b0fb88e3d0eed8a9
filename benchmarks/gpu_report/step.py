"""Arguments of a running step of the report, and the methods by which it records its results.

Example usage:

    def run(step: Step) -> None:
        x = torch.randn(step.pick((32, 64, 112, 112), (2, 4, 5, 5)), device=step.device)
        step.figure("host", microseconds(x), "µs", shape="(32, 64, 112, 112)", layer="plain")
        step.check("the output is float32", layer(x).dtype == torch.float32)
        with step.attempt("autocast"):  # an exception is a failed check, and the step continues
            assert_close(under_autocast(x), expected)
"""

import json
import math
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

# Limit of each text, so that the report stays readable.
MAX_CHARACTERS = 4000


class Step:
    """Handle of a running step. It writes each record to the file at once, so a killed step loses none.

    Args:
        stand_in: the CPU stands in for the GPU, and small shapes for large ones.
        output: an empty folder for files of the step. The runner moves them into the report's folder, and drops those
            that are too many or too large.
        records: where the records go, a line of JSON each.
        plant: `MODULE:NAME` of the context manager that a test plants in the processes of the step.

    Attributes:
        stand_in: as given.
        output: as given.
        plant: as given.
    """

    def __init__(self, *, stand_in: bool, output: Path, records: TextIO, plant: str = "") -> None:
        self.stand_in = stand_in
        self.output = output
        self.plant = plant
        self._records = records

    @cached_property
    def device(self) -> "torch.device":
        """The first CUDA device, which becomes the current one; the CPU for a stand-in.

        Raises:
            RuntimeError: there is no CUDA device.
        """
        import torch  # noqa: PLC0415 - not every step needs torch

        if self.stand_in:
            self.record("device", text="CPU")
            return torch.device("cpu")
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        self.record("device", text=torch.cuda.get_device_name(device))
        return device

    def pick(self, real: T, stand_in: T) -> T:
        """Returns the first value on a GPU, and the second one on its stand-in."""
        return stand_in if self.stand_in else real

    def check(self, name: str, passed: object, detail: object = "") -> bool:
        """Records whether something holds, and returns whether it does.

        Args:
            name: what has to hold, as a sentence.
            passed: whether it does.
            detail: expected and found values, or why it does not hold.
        """
        self.record("check", name=name, passed=bool(passed), detail=str(detail)[:MAX_CHARACTERS])
        return bool(passed)

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Records a check that fails if its body raises; the step continues after the block."""
        try:
            yield
        except Exception:  # noqa: BLE001 - it is in the report
            self.check(name, passed=False, detail=traceback.format_exc()[-MAX_CHARACTERS:])
        else:
            self.check(name, passed=True)

    def figure(self, name: str, value: float | str, unit: str = "", **of: object) -> None:
        """Records a figure.

        Args:
            name: what was measured; the heading of a column.
            value: the number; or a text, such as a version.
            unit: such as "µs".
            of: the measured case, such as `shape="(2, 64, 7, 7)"`. Figures of the same case form a row of a table.
        """
        if isinstance(value, float) and not math.isfinite(value):
            value = str(value)  # JSON has no such number
        self.record("figure", name=name, value=value, unit=unit, of={key: str(each) for key, each in of.items()})

    def note(self, text: object) -> None:
        """Records a remark, or a longer text such as the output of a program."""
        self.record("note", text=str(text)[:MAX_CHARACTERS])

    def record(self, kind: str, **what: Any) -> None:
        """Records one line; steps use the methods above."""
        self._records.write(json.dumps({"kind": kind, **what}) + "\n")
        self._records.flush()
