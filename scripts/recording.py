"""A recording of a terminal as an animated SVG, `recording.py FILE`: the real output of the demo and `status --watch`.

The demo takes a minute; its scene is played faster. A reader who wants no motion sees the last picture.
"""

import fcntl
import html
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
COLUMNS, ROWS = 80, 33
TOTAL_SECONDS, TYPING_SECONDS, WATCH_SECONDS = 20.0, 0.8, 8.0

# The shortest duration of a frame.
FRAME_SECONDS = 0.2

CELL, LINE, EDGE, BAR = 8.0, 17, 14, 26
BACKGROUND, INK = "#14171b", "#d8dce1"
COLOURS = ("#5c6470", "#ff7b72", "#4fd188", "#f5b74e", "#6aa9ff", "#d2a8ff", "#56d4dd", "#d8dce1")

ESCAPE = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b[()][A-Z0-9]|\x1b\][^\x07]*\x07|\x1b[=>]")
Style = tuple[str, bool, bool]
PLAIN: Style = ("", False, False)
Line = tuple[tuple[str, Style], ...]


@dataclass
class Screen:
    """A terminal's screen: text, colours, and the movements of the cursor that rich and `status --watch` use."""

    cells: list[list[tuple[str, Style]]] = field(default_factory=lambda: [[] for _ in range(ROWS)])
    row: int = 0
    column: int = 0
    style: Style = PLAIN

    def write(self, text: str) -> None:
        """Print a text with its control sequences."""
        at = 0
        while at < len(text):
            if found := ESCAPE.match(text, at):
                if found[2]:
                    self._control(found[1], found[2])
                at = found.end()
                continue
            self._put(text[at])
            at += 1

    def lines(self) -> tuple[Line, ...]:
        """Each line as runs of text of one style."""
        return tuple(_runs(cells) for cells in self.cells)

    def _put(self, letter: str) -> None:
        if letter == "\n":
            self._down()
        elif letter == "\r":
            self.column = 0
        elif letter == "\b":
            self.column = max(0, self.column - 1)
        elif letter.isprintable():
            if self.column >= COLUMNS:
                self.column = 0
                self._down()
            cells = self.cells[self.row]
            cells += [(" ", PLAIN)] * (self.column + 1 - len(cells))
            cells[self.column] = (letter, self.style)
            self.column += 1

    def _down(self) -> None:
        self.row += 1
        if self.row == ROWS:
            self.cells = [*self.cells[1:], []]
            self.row -= 1

    def _control(self, arguments: str, letter: str) -> None:
        numbers = [int(number) for number in arguments.strip("?").split(";") if number]
        first = numbers[0] if numbers else 1
        if letter == "m":
            self._colour(numbers or [0])
        elif letter == "A":
            self.row = max(0, self.row - first)
        elif letter == "G":
            self.column = first - 1
        elif letter == "H":
            self.row, self.column = (numbers[0] - 1, numbers[1] - 1) if len(numbers) > 1 else (0, 0)
        elif letter == "K":
            del self.cells[self.row][0 if numbers == [2] else self.column :]
        elif letter == "J":
            start = 0 if numbers == [2] else self.row
            self.cells[start:] = (
                [[] for _ in range(ROWS - start)]
                if start == 0
                else [self.cells[start][: self.column], *([] for _ in range(ROWS - start - 1))]
            )

    def _colour(self, numbers: list[int]) -> None:
        colour, bold, dim = self.style
        while numbers:
            code = numbers.pop(0)
            if code == 0:
                colour, bold, dim = PLAIN
            elif code in {1, 2}:
                bold, dim = bold or code == 1, dim or code == 2
            elif code == 22:
                bold = dim = False
            elif code == 38:
                kind = numbers.pop(0)
                rest = [numbers.pop(0) for _ in range(3 if kind == 2 else 1)]
                colour = f"rgb({','.join(map(str, rest))})" if kind == 2 else COLOURS[rest[0] % 8]
            elif code == 39:
                colour = ""
            elif code % 60 in range(30, 38):
                colour = COLOURS[code % 10]
        self.style = colour, bold, dim


def _runs(cells: list[tuple[str, Style]]) -> Line:
    runs: list[tuple[str, Style]] = []
    for letter, style in cells:
        if runs and runs[-1][1] == style:
            runs[-1] = (runs[-1][0] + letter, style)
        else:
            runs.append((letter, style))
    while runs and not runs[-1][0].rstrip():
        runs.pop()
    return tuple(runs)


Frames = list[tuple[float, tuple[Line, ...]]]


def recorded(prompt: str, command: list[str], environ: dict[str, str], seconds: float | None) -> Frames:
    """Times and screens of a command that runs in a terminal, until its end or for some seconds."""
    screen, frames = Screen(), []
    for length in range(0, len(prompt) + 1, 4):
        typed = Screen()
        typed.write(f"\x1b[1;32m$\x1b[0m {prompt[:length]}")
        frames.append((TYPING_SECONDS * length / len(prompt), typed.lines()))
    screen.write(f"\x1b[1;32m$\x1b[0m {prompt}\r\n")
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(ROOT)
        os.execvpe(command[0], command, environ)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS - 1, COLUMNS, 0, 0))
    began, rest = time.monotonic(), b""
    while seconds is None or time.monotonic() < began + seconds:
        if not select.select([terminal], [], [], 0.1)[0]:
            continue
        try:
            rest += os.read(terminal, 65_536)
        except OSError:
            break  # the command has ended
        text = rest.decode(errors="ignore")
        rest = b""
        screen.write(text)
        frames.append((TYPING_SECONDS + time.monotonic() - began, screen.lines()))
    os.kill(child, signal.SIGTERM)
    os.waitpid(child, 0)
    return frames


def scaled(frames: Frames, start: float, seconds: float) -> Frames:
    """The frames from `start` on, shortened to `seconds` except for the typing, none shorter than FRAME_SECONDS."""
    end = frames[-1][0]
    factor = (seconds - TYPING_SECONDS - 1.5) / max(end - TYPING_SECONDS, 1e-9)
    kept: Frames = []
    for at, screen in frames:
        when = start + (at if at <= TYPING_SECONDS else TYPING_SECONDS + (at - TYPING_SECONDS) * min(1.0, factor))
        if kept and when < kept[-1][0] + FRAME_SECONDS and at > TYPING_SECONDS:
            kept[-1] = (kept[-1][0], screen)
        elif not kept or kept[-1][1] != screen:
            kept.append((when, screen))
    return kept


def svg(frames: Frames) -> str:
    """An SVG with the frames one below the other, and a window that shows one frame; equal lines are stored once."""
    known: dict[Line, int] = {}
    bodies, keys = [], []
    height = ROWS * LINE
    for number, (when, screen) in enumerate(frames):
        uses = [
            f'<use href="#l{known.setdefault(line, len(known))}" y="{number * height + (row + 1) * LINE - 4}"/>'
            for row, line in enumerate(screen)
            if line
        ]
        bodies.append("".join(uses))
        keys.append(f"{100 * when / TOTAL_SECONDS:.2f}%{{transform:translateY({-number * height}px)}}")
    keys.append(f"100%{{transform:translateY({-(len(frames) - 1) * height}px)}}")
    lines = "\n".join(_text(line, number) for line, number in known.items())
    width = COLUMNS * CELL
    whole = f"{width + 2 * EDGE:g}", f"{height + BAR + EDGE}"
    dots = "".join(f'<circle cx="{EDGE + 5 + 16 * at}" cy="14" r="5" fill="#3a424c"/>' for at in range(3))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole[0]} {whole[1]}" width="{whole[0]}" '
        f'height="{whole[1]}" role="img">\n'
        "<title>A terminal with scripts/demo and statsd-bn status --watch</title>\n<style>\n"
        f"text{{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:{INK};"
        "white-space:pre}\n"
        f".f{{animation:f {TOTAL_SECONDS:g}s steps(1,end) infinite}}\n"
        f"@media (prefers-reduced-motion:reduce){{.f{{animation:none;"
        f"transform:translateY({-(len(frames) - 1) * height}px)}}}}\n"
        f"@keyframes f{{{''.join(keys)}}}\n</style>\n"
        f'<rect width="{whole[0]}" height="{whole[1]}" rx="9" fill="{BACKGROUND}"/>{dots}\n<defs>\n{lines}\n</defs>\n'
        f'<svg x="{EDGE}" y="{BAR}" width="{width:g}" height="{height}"><g class="f">\n'
        + "\n".join(bodies)
        + "\n</g></svg>\n</svg>\n"
    )


def _text(line: Line, number: int) -> str:
    length = sum(len(text) for text, _ in line)
    parts = []
    for text, (colour, bold, dim) in line:
        looks = f' fill="{colour}"' * bool(colour) + ' font-weight="700"' * bold + ' opacity=".6"' * dim
        parts.append(f"<tspan{looks}>{html.escape(text)}</tspan>" if looks else html.escape(text))
    return f'<text id="l{number}" textLength="{length * CELL:g}" xml:space="preserve">{"".join(parts)}</text>'


@contextmanager
def training(folder: Path, environ: dict[str, str]) -> Iterator[None]:
    """A server and four ranks, one of them with tripled inputs; first waits until the server reports that rank."""
    fault = folder / "fault"
    fault.write_text("tripled")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    endpoint = f"ipc://{folder}/bn.socket"
    commands = [
        [sys.executable, "-m", "server", "--bind", endpoint],
        [*torchrun, "tests/programs/resnet/train.py", endpoint, str(fault)],
    ]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = [
        subprocess.Popen(command, cwd=ROOT, env=environ, start_new_session=True, **quiet) for command in commands
    ]
    try:
        wait_for_finding(endpoint, environ)
        yield
    finally:
        for one in reversed(started):
            os.killpg(one.pid, signal.SIGTERM)
            one.wait()


def wait_for_finding(endpoint: str, environ: dict[str, str]) -> None:
    """Wait until the server has reported the rank with tripled inputs."""
    status = [sys.executable, "-m", "server", "status", "--json", endpoint]
    for _ in range(100):
        output = subprocess.run(status, cwd=ROOT, env=environ, capture_output=True, text=True, check=False).stdout
        if '"kind": "skew"' in output:
            return
        time.sleep(1)
    raise TimeoutError("the server has not found the rank with tripled inputs")


def main(file: str) -> None:
    """Record both scenes, and write the SVG."""
    environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "PYTHONPATH": str(ROOT)}
    demo = recorded("scripts/demo", ["scripts/demo"], environ, None)
    with tempfile.TemporaryDirectory() as folder, training(Path(folder), environ):
        status = [sys.executable, "-m", "server", "status", "--watch", f"ipc://{folder}/bn.socket"]
        watch = recorded("statsd-bn status --watch", status, environ, WATCH_SECONDS - 2)
    first = TOTAL_SECONDS - WATCH_SECONDS
    Path(file).write_text(svg([*scaled(demo, 0.0, first), *scaled(watch, first, WATCH_SECONDS)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
