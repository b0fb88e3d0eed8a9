"""Results of the trainings: as a table, as JSON, and as a verdict."""

from dataclasses import asdict, dataclass

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import digits
from ways import REPLICAS, Length, Trained

# After a hundred steps, differences from float32 rounding are about 1e-6, and without synchronisation about 1.
TOLERANCE = 1e-4

WHOLE_BATCH, SYNCHRONISED, UNSYNCHRONISED, DATA_PARALLEL = WAYS = (
    "whole batch",
    "synchronised",
    "unsynchronised",
    "data parallel",
)

TITLES = {
    WHOLE_BATCH: f"1 process, batch of {digits.BATCH}",
    SYNCHRONISED: f"{REPLICAS} processes, synchronised",
    UNSYNCHRONISED: f"{REPLICAS} processes, unsynchronised",
    DATA_PARALLEL: f"DataParallelWithCallback x {REPLICAS}",
}


@dataclass(frozen=True, slots=True)
class Result:
    """A row of the table.

    Attributes:
        accuracy: share of the test images that are recognised after the training.
        weights: largest absolute difference from the whole batch's weights at the step of comparison.
        running_statistics: the same for the running means, variances and batch counts.
        rounds: exchanges of statistics between processes, if any.
        median_round_trip: duration of an exchange, in seconds.
        seconds: duration of the training.
    """

    accuracy: float
    weights: float
    running_statistics: float
    rounds: int | None
    median_round_trip: float | None
    seconds: float

    @property
    def largest_difference(self) -> float:
        """The larger one of the two differences."""
        return max(self.weights, self.running_statistics)

    @property
    def equals_whole_batch(self) -> bool:
        """Whether both differences are within the tolerance; NaN is not."""
        return self.weights <= TOLERANCE and self.running_statistics <= TOLERANCE


def results(trained: dict[str, Trained]) -> dict[str, Result]:
    """Compares each way with the whole batch."""
    _, test = digits.load()
    weights = {name for name, _ in digits.network().named_parameters()}
    statistics = digits.network().state_dict().keys() - weights
    whole = trained[WHOLE_BATCH].compared
    return {
        way: Result(
            digits.accuracy(one.final, test),
            _difference(one.compared, whole, weights),
            _difference(one.compared, whole, statistics),
            one.rounds,
            one.median_round_trip,
            one.seconds,
        )
        for way, one in trained.items()
    }


def _difference(found: digits.State, whole: digits.State, names: set[str]) -> float:
    # torch's max, unlike Python's, does not lose a NaN.
    return float(torch.stack([(found[name].double() - whole[name].double()).abs().max() for name in names]).max())


def as_json(rows: dict[str, Result], length: Length) -> dict[str, object]:
    """Returns the results for programs."""
    return {
        "steps": length.steps,
        "compared_after": length.compare,
        "tolerance": TOLERANCE,
        "ways": {way: asdict(row) | {"equals_whole_batch": row.equals_whole_batch} for way, row in rows.items()},
    }


def show(console: Console, rows: dict[str, Result], length: Length) -> None:
    """Prints the table and an explanation."""
    title = f"Accuracy after {length.steps} steps; differences from the whole batch after {length.compare}"
    # Without frame and column lines it fits into 80 columns.
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("Training", vertical="bottom")
    for heading in ("Test accuracy", "Weights differ", "Running stats differ", "Median round trip", "Time"):
        table.add_column(heading.replace(" ", "\n"), justify="right", vertical="bottom")
    for way, row in rows.items():
        table.add_row(TITLES[way], *_cells(way, row), style="bold" if way == SYNCHRONISED else None)
    console.print(table)
    console.print(
        "\nDifferences are the largest absolute ones. The unsynchronised model is rank 0's; its last batch norm had "
        f"{digits.BATCH // REPLICAS} values per channel. A round is one exchange for one layer, forward or backward; "
        f"its time includes the wait for the slowest of {REPLICAS} processes, which share memory from the second round "
        "on. Most of a short training's time is the start of its processes."
    )


def _cells(way: str, row: Result) -> list[str]:
    differences = ("-", "-") if way == WHOLE_BATCH else (f"{row.weights:.1e}", f"{row.running_statistics:.1e}")
    trip = "-" if row.median_round_trip is None else f"{row.median_round_trip * 1000:.2f} ms"
    return [f"{row.accuracy:.1%}", *differences, trip, f"{row.seconds:.1f} s"]


def cost(rows: dict[str, Result]) -> str:
    """Returns a sentence with the cost of synchronisation."""
    with_it, without = rows[SYNCHRONISED].seconds, rows[UNSYNCHRONISED].seconds
    ratio = with_it / without
    return f"{REPLICAS} processes took {with_it:.1f} s synchronised and {without:.1f} s not: {ratio:.2f} times as long."


def verdict(rows: dict[str, Result], length: Length) -> tuple[bool, str]:
    """Returns whether synchronised training equals the whole batch's up to rounding, with a sentence for people."""
    synchronised = [SYNCHRONISED, DATA_PARALLEL]
    wrong = [way for way in synchronised if not rows[way].equals_whole_batch]
    if wrong:
        found = "; ".join(f"{TITLES[way]}: {rows[way].largest_difference:.1e}" for way in wrong)
        return False, f"Not the whole batch: expected differences of at most {TOLERANCE:.0e}, got {found}."
    largest = max(rows[way].largest_difference for way in synchronised)
    return True, (
        "Synchronised training equals training on the whole batch: the largest difference after "
        f"{length.compare} steps is {largest:.1e}, float32 rounding (the demo fails above {TOLERANCE:.0e}). Without "
        f"synchronisation it is {rows[UNSYNCHRONISED].largest_difference:.1e}."
    )
