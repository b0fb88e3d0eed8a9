"""Text of the report: steps, devices, failed checks, and tables of figures."""

from collections.abc import Iterable, Sequence
from typing import Any

from gpu_report.results import PASSED, Result, Results
from gpu_report.steps import PLANS, Plan

# Significant digits of a figure in a table; `results.json` has them all.
DIGITS = 4


def written(results: Results, plans: Sequence[Plan] = PLANS) -> str:
    """Returns the text of `report.md`."""
    ran = [plan for plan in plans if plan.name in results.steps]
    missing = [plan.name for plan in plans if plan.name not in results.steps]
    parts = ["# GPU report", _marks(results), _overview(results, ran)]
    if missing:
        parts.append(f"Not run yet: {', '.join(missing)}.")
    parts += [_step(plan, results.steps[plan.name]) for plan in ran]
    return "\n\n".join(part for part in parts if part) + "\n"


def _marks(results: Results) -> str:
    """Returns warnings about stand-ins and planted faults, whose figures are not a GPU's."""
    stood_in = [name for name, result in results.steps.items() if result.stand_in]
    spoilt = [f"{name} ({result.plant})" for name, result in results.steps.items() if result.plant]
    lines = []
    if stood_in:
        lines.append(f"**Stand-in**: no GPU was used in {', '.join(stood_in)}; the figures there mean nothing.")
    if spoilt:
        lines.append(f"**Planted faults** in {', '.join(spoilt)}.")
    return "\n\n".join(lines)


def _overview(results: Results, ran: Sequence[Plan]) -> str:
    rows = []
    for plan in ran:
        result = results.steps[plan.name]
        may_fail = " (may fail)" if result.may_fail and result.outcome != PASSED else ""
        passed = f"{len(result.checks) - len(result.failed_checks)} of {len(result.checks)}"
        ran_on = f"{result.device or 'unknown'}{', stand-in' if result.stand_in else ''}"
        rows.append((plan.name, result.outcome + may_fail, passed, f"{result.seconds:g} s", ran_on, result.commit))
    return _table(("step", "outcome", "checks passed", "time", "ran on", "commit"), rows)


def _step(plan: Plan, result: Result) -> str:
    parts = [f"## {plan.name}{', stand-in' if result.stand_in else ''}", plan.purpose]
    parts.append(f"Started {result.started}, took {result.seconds:g} of {result.limit:g} s: {result.outcome}.")
    parts += [f"Failed: **{check['name']}**\n\n{_block(check['detail'])}".strip() for check in result.failed_checks]
    if passed := [check for check in result.checks if check["passed"]]:
        lines = "\n".join(_passed(check) for check in passed)
        parts.append(f"<details><summary>Passed: {len(passed)} checks</summary>\n\n{lines}\n\n</details>")
    parts += _figures(result.figures)
    parts += [_note(text) for text in result.notes]
    if result.files:
        parts.append("Files: " + ", ".join(f"`{name}`" for name in result.files))
    if result.log:
        parts.append("The end of its output:\n\n" + _block(result.log))
    return "\n\n".join(part for part in parts if part)


def _passed(check: dict[str, Any]) -> str:
    detail = " ".join(check["detail"].split())
    return f"- {check['name']}" + (f": {detail}" if detail else "")


def _figures(figures: Sequence[dict[str, Any]]) -> Iterable[str]:
    """Yields a table for the figures of each kind of case, in the order of the records."""
    tables: dict[tuple[str, ...], dict[tuple[str, ...], dict[str, str]]] = {}
    for figure in figures:
        row = tables.setdefault(tuple(figure["of"]), {}).setdefault(tuple(figure["of"].values()), {})
        heading = f"{figure['name']} ({figure['unit']})" if figure["unit"] else figure["name"]
        row[heading] = _number(figure["value"])
    for keys, rows in tables.items():
        headings = list(dict.fromkeys(heading for row in rows.values() for heading in row))
        if not keys:
            yield _table(("figure", "value"), list(rows[()].items()))
            continue
        yield _table(
            (*keys, *headings), [(*of, *(row.get(heading, "") for heading in headings)) for of, row in rows.items()]
        )


def _number(value: object) -> str:
    return f"{value:.{DIGITS}g}" if isinstance(value, float) and abs(value) < 10**DIGITS else str(value)


def _note(text: str) -> str:
    return _block(text) if "\n" in text.strip() else text


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(_cell(each) for each in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _block(text: str) -> str:
    return f"```text\n{text.strip()}\n```".replace("\r", "") if text.strip() else ""
