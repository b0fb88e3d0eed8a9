"""The main figures as SVG bar charts, for light and dark backgrounds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from bench.results import ROOT, Result

FOLDER = ROOT / "docs" / "plots"

WIDTH, LEFT, RIGHT, TOP, BAR, GAP, GROUP_GAP = 720, 250, 70, 44, 16, 3, 14

# The colours of the series also differ in brightness; the reader's setting chooses light or dark.
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.title { font-weight: 600; font-size: 15px }
.small { font-size: 11px }
.s0 { fill: #0550ae }
.s1 { fill: #bf8700 }
.s2 { fill: #6e7781 }
line { stroke: #8c959f; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.s0 { fill: #79c0ff }
.s1 { fill: #e3b341 }
.s2 { fill: #8b949e }
}
"""


@dataclass(frozen=True, slots=True)
class Plot:
    """Bars in groups.

    Attributes:
        title: the plotted quantity, with its unit.
        groups: the values of each group by series; all have the same series.
        line: a reference value and its label, drawn as a line; or None.
        note: date and commit of the figures.
    """

    title: str
    groups: Mapping[str, Mapping[str, float]]
    line: tuple[float, str] | None
    note: str

    def in_svg(self) -> str:
        """Returns the plot as SVG."""
        series = list(dict.fromkeys(name for values in self.groups.values() for name in values))
        highest = max(
            [value for values in self.groups.values() for value in values.values()] + [(self.line or (0,))[0]]
        )
        scale = (WIDTH - LEFT - RIGHT) / highest
        parts, y = list(_legend(self.title, series)), TOP + 24
        top = y
        for group, values in self.groups.items():
            middle = y + (len(values) * (BAR + GAP)) / 2 + 2
            parts.append(f'<text x="{LEFT - 8}" y="{middle:.0f}" text-anchor="end">{escape(group)}</text>')
            for name, value in values.items():
                length = max(1.0, value * scale)
                parts.append(
                    f'<rect class="s{series.index(name)}" x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}"/>'
                    f'<text class="small" x="{LEFT + length + 5:.1f}" y="{y + BAR - 4}">{value:.3g}</text>'
                )
                y += BAR + GAP
            y += GROUP_GAP
        if self.line:
            at = LEFT + self.line[0] * scale
            parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{top - 4}" y2="{y - GROUP_GAP}"/>')
            parts.append(f'<text class="small" x="{at:.1f}" y="{y}" text-anchor="middle">{escape(self.line[1])}</text>')
            y += 16
        parts.append(f'<text class="small" x="8" y="{y + 8}">{escape(self.note)}</text>')
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 18}" role="img">'
        return "\n".join([head, f"<title>{escape(self.title)}</title>", f"<style>{STYLE}</style>", *parts, "</svg>\n"])


def _legend(title: str, series: Sequence[str]) -> list[str]:
    parts, x = [f'<text class="title" x="8" y="20">{escape(title)}</text>'], 8
    for number, name in enumerate(series if len(series) > 1 else []):
        parts.append(f'<rect class="s{number}" x="{x}" y="32" width="12" height="12"/>')
        parts.append(f'<text x="{x + 17}" y="43">{escape(name)}</text>')
        x += 40 + 7 * len(name)
    return parts


def _step(found: Mapping[str, Any]) -> tuple[str, Mapping[str, Mapping[str, float]], tuple[float, str]]:
    ways = {
        "ours, in shared memory": "memory",
        "ours, over the server": "server",
        "ours, over gloo": "process group",
        "gloo's textbook": "gloo",
    }
    groups = {words: {"step": found[way] / found["unsynchronised"]} for words, way in ways.items()}
    title = f"A training step of a ResNet-18 in {found['members']} processes, unsynchronised = 1"
    return title, groups, (1.0, "unsynchronised")


def _transports(found: Sequence[Mapping[str, Any]]) -> tuple[str, Mapping[str, Mapping[str, float]], None]:
    series = {"shared memory": "memory", "server": "ours", "gloo's all_reduce": "gloo"}
    groups = {
        f"{row['replicas']} members": {words: row[way] / 1e3 for words, way in series.items()}
        for row in found
        if row["transport"] == "ipc" and row["channels"] == 256 and row["replicas"] > 1
    }
    return "One round of 256 channels, back to back, in milliseconds", groups, None


def _shapes(found: Mapping[str, Any]) -> tuple[str, Mapping[str, Mapping[str, float]], tuple[float, str]]:
    shown = 1, "float32", "contiguous"
    rows = [row for row in found["layers"] if (row["threads"], row["dtype"], row["layout"]) == shown]
    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        name = "alone" if row["members"] == 1 else f"{row['members']} members"
        groups.setdefault(f"({row['shape'].replace(',', ', ')})", {})[name] = row["ratio"]
    return "Forward and backward of a layer, float32, nn.BatchNorm2d = 1", groups, (1.0, "nn.BatchNorm2d")


PLOTS = {"train_step": _step, "round_trip": _transports, "layer": _shapes}


def drawn() -> dict[str, str]:
    """Returns the plots of the saved results, by the name of the benchmark."""
    found = {}
    for name, plot in PLOTS.items():
        if result := Result.of(name):
            title, groups, line = plot(result.found)
            note = f"{result.date}, commit {result.commit}, {result.busy:g} processors in use by others"
            found[name] = Plot(title, groups, line, note).in_svg()
    return found


def write() -> None:
    """Writes the plots."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in drawn().items():
        (FOLDER / f"{name}.svg").write_text(text)
