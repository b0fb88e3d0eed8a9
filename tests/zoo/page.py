"""The report of a run of the whole zoo, in Markdown."""

from collections.abc import Sequence

import torch

from zoo.catalogue import Survey
from zoo.exhibits import BAR, Exhibit
from zoo.libraries import library
from zoo.specimen import BATCH

TEXT = """\
# The zoo

`scripts/zoo` converts the smallest network of each family of torchvision and timm that has batch
norm, runs a step of training in two replicas, and compares it with the unconverted network on the whole batch.

{summary}

- Compared are the output, the gradients of the input and of the parameters, and all buffers, in float64, with {batch}
  images, of which one replica gets {first} and the other {second}. *Difference* is the largest of all of them, relative
  to the largest value of its tensor. The bar is {bar:.0e}.
- *Unsynchronised* is the difference of the output where each replica normalises its own images. If it were not far
  above the bar, the comparison could not fail.
- `revert_model` then has to give back each layer's class, the same objects and the same tensors.
- Drop-out, drop path and stochastic depth are set to 0, in the original too. A network that still computes something
  else each time is not compared. Weights are random; where a library begins a branch with 0, and so hides it, they are
  drawn anew.
- A *family* is what one module of a library builds under names that begin alike. Of detectors the parts are compared,
  since the whole draws lots which boxes it learns from, and of `raft_large` the part with batch norm, since the whole
  computes in float32 where it looks. `s3d` has another last pooling, which takes small videos.

Versions: torch {torch}, torchvision {torchvision}, timm {timm}.

{tables}
"""


def text(exhibits: Sequence[Exhibit], missing: Sequence[Survey] = ()) -> str:
    """Returns the report; `missing` are networks that the run did not come to."""
    good = [one for one in exhibits if not one.problem]
    bad = [one for one in exhibits if one.problem]
    tables = [_table(name, good) for name in ("torchvision", "timm")]
    if bad:
        tables.append(_left(bad))
    if missing:
        tables.append(_not_reached(missing))
    return TEXT.format(
        summary=_summary(exhibits, len(missing)),
        batch=BATCH,
        first=BATCH - BATCH // 2,
        second=BATCH // 2,
        bar=BAR,
        torch=torch.__version__.partition("+")[0],
        torchvision=library("torchvision").__version__.partition("+")[0],
        timm=library("timm").__version__,
        tables="\n\n".join(tables),
    )


def _summary(exhibits: Sequence[Exhibit], missing: int) -> str:
    agree = [one for one in exhibits if not one.problem]
    layers = sum(number for one in agree for _, number in one.layers)
    kinds = {kind for one in agree for kind, _ in one.layers}
    families = len({(one.library, one.family) for one in exhibits}) + missing
    good = {(one.library, one.family) for one in agree} - {(one.library, one.family) for one in exhibits if one.problem}
    worst = max((one.difference or 0.0 for one in agree), default=0.0)
    return (
        f"{len(good)} of {families} families agree in all of it, with {layers} layers of {len(kinds)} classes. "
        f"The largest difference is {worst:.0e}." + (f" {missing} are still to be compared." if missing else "")
    )


def _table(name: str, exhibits: Sequence[Exhibit]) -> str:
    shown = (one for one in sorted(exhibits, key=_order) if one.library == name)
    rows = (
        f"| {one.family} | {_name(one)} | {_layers(one)} | {one.difference:.0e} | {one.unsynchronised:.0e} |"
        for one in shown
    )
    head = ["| family | network | layers | difference | unsynchronised |", "|---|---|---|---:|---:|"]
    return "\n".join([f"## {name}", "", *head, *rows])


def _left(exhibits: Sequence[Exhibit]) -> str:
    rows = (
        f"| {one.library}: {one.family} | {_name(one)} | {_layers(one)} | {one.problem.replace('|', '/')} |"
        for one in sorted(exhibits, key=_order)
    )
    head = ["| family | network | layers | why |", "|---|---|---|---|"]
    return "\n".join(["## Not compared", "", *head, *rows])


def _not_reached(missing: Sequence[Survey]) -> str:
    names = ", ".join(sorted(f"{one.architecture.library}: {one.architecture.name}" for one in missing))
    return f"## Still to be compared\n\nThe run ended before it came to them: {names}."


def _order(one: Exhibit) -> tuple[str, ...]:
    return one.library, one.family, one.name, one.part


def _name(one: Exhibit) -> str:
    return f"{one.name}, `{one.part}` alone" if one.part else one.name


def _layers(one: Exhibit) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in one.layers)
