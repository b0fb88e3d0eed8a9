"""Steps of the report, in their order, with each one's share of the time.

A step is a module here with a function `run(step)`, which takes a `gpu_report.step.Step`, and with a docstring, the
first paragraph of which appears in the report. The runner never imports the module, so it may import anything.
"""

import ast
import importlib.util
from dataclasses import dataclass
from pathlib import Path

# Of all steps. The shares add up to less, because the first import of torch takes longer: it reads from the disk.
TOTAL_SECONDS = 480.0


@dataclass(frozen=True)
class Plan:
    """A step that may be run.

    Attributes:
        name: of the step, and of its module here.
        seconds: its share of `TOTAL_SECONDS`.
        may_fail: a failure appears in the report and does not change the exit status.
        module: the module of `run`; empty for the module with the step's name here.
    """

    name: str
    seconds: float
    may_fail: bool = False
    module: str = ""

    @property
    def full_module(self) -> str:
        """The module's name as Python imports it."""
        return self.module or f"{__name__}.{self.name}"

    @property
    def purpose(self) -> str:
        """First paragraph of the module's docstring, read without running the module; empty if it has none."""
        try:
            spec = importlib.util.find_spec(self.full_module)
            tree = ast.parse(Path(spec.origin).read_text()) if spec and spec.origin else ast.parse("")
        except (ImportError, SyntaxError, ValueError):  # the step's process will raise the same
            tree = ast.parse("")
        text = ast.get_docstring(tree) or ""
        return " ".join(text.split("\n\n")[0].split())


PLANS = (
    Plan("versions", 15),
    Plan("key_figures", 60),
    Plan("correctness", 50),
    Plan("tests", 75),
    Plan("graphs", 40),
    Plan("compile", 50),
    Plan("ranks", 50),
    Plan("nccl", 40, may_fail=True),
    Plan("resnet50", 60),
)
