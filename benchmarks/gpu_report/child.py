"""Process of one step: `python -m gpu_report.child MODULE RECORDS OUTPUT [--stand-in] [--plant MODULE:NAME]`."""

import argparse
import importlib
import multiprocessing
import os
import sys
import traceback
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from gpu_report.step import MAX_CHARACTERS, Step


def main() -> None:
    """Runs the step; the last record says that the step ended, or has the traceback."""
    parser = argparse.ArgumentParser()
    parser.add_argument("module")
    parser.add_argument("records", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--stand-in", action="store_true")
    parser.add_argument("--plant", default="")
    options = parser.parse_args()
    # The fork server of ranks loads these once. Not set at import, because tests that import this module set others.
    starter = multiprocessing.get_context("forkserver")
    starter.set_forkserver_preload(["client", "gpu_report.networks", "torch._dynamo"])
    status = 0
    with options.records.open("a") as records:
        step = Step(stand_in=options.stand_in, output=options.output, records=records, plant=options.plant)
        try:
            module = importlib.import_module(options.module)
            with planted(options.plant):
                module.run(step)
            step.record("ended")
        except BaseException:  # noqa: BLE001 - a step may not end by SystemExit
            text = traceback.format_exc()
            print(text, file=sys.stderr)
            step.record("raised", text=text[-MAX_CHARACTERS:])
            status = 1
    # Everything is recorded. Process groups and CUDA contexts may hang or crash when the interpreter destroys them.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def planted(plant: str) -> AbstractContextManager[object]:
    """Returns the context manager that `MODULE:NAME` makes when it is called, or one that does nothing."""
    if not plant:
        return nullcontext()
    module, _, name = plant.partition(":")
    found: AbstractContextManager[object] = getattr(importlib.import_module(module), name)()
    return found


if __name__ == "__main__":
    main()
