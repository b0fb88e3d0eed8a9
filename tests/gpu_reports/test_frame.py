"""The runner of the GPU report, with short steps: no fault of a step affects another step's result."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from gpu_report import __main__ as program
from gpu_report import measuring, runner
from gpu_report.results import Results
from gpu_report.runner import Runner
from gpu_report.steps import Plan
from torch.autograd import DeviceType

from support.launched import WAIT_SECONDS
from support.paths import ROOT

PATHS = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests")]

SOUND = "def run(step):\n    step.check('two is two', 2 == 2)\n    step.figure('two', 2.0, 'pieces')\n"

# Ways in which a step can fail, and the outcome in the report. Each step records a check before it fails.
FAULTS = {
    "hangs": ("signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)", "ended at its limit of 1 s"),
    "crashes": ("os.kill(os.getpid(), signal.SIGSEGV)", "crashed: Segmentation fault"),
    "exits": ("os._exit(0)", "ended before its time, with exit status 0"),
    "leaves": ("sys.exit(0)", "raised SystemExit: 0"),
    "raises": ("raise ValueError('no such kernel')", "raised ValueError: no such kernel"),
    "scribbles": ('step._records.write(\'{"kind": "check"}\\n[1\\n\')', "2 of its records could not be read"),
    "fails": ("step.check('one is two', 1 == 2, 'got 1')", "1 of 2 checks failed"),
    "does not parse": ("(", "raised SyntaxError: '(' was never closed"),
}


def source(line: str) -> str:
    before = "import os, signal, sys, time\ndef run(step):\n    step.check('begins', True)\n"
    return f"{before}    {line}\n"


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """Makes a step from a module's text, in a new file: Python's cache mixes up files of the same length and second."""
    numbers = itertools.count()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *PATHS]))
    monkeypatch.syspath_prepend(tmp_path)

    def make(name, text, seconds=30.0, **options):
        module = f"step_that_{name.replace(' ', '_')}_{next(numbers)}"
        (tmp_path / f"{module}.py").write_text(text)
        return Plan(name, seconds, module=module, **options)

    return make


@pytest.fixture
def report(tmp_path, capsys):
    def run(*plans, known=(), **options):
        folder = tmp_path / "report"
        status = program.report(Runner(stand_in=True, **options), plans, Results.load(folder), (*plans, *known))
        capsys.readouterr()
        found = json.loads((folder / "results.json").read_text())
        return status, found["steps"], (folder / "report.md").read_text()

    return run


@pytest.fixture(autouse=True)
def _signals():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_step_that_fails_does_not_stop_other_steps(plan, report, monkeypatch):
    monkeypatch.setattr(runner, "SPARE_SECONDS", 0.0)
    faulty = [plan(name, source(line), 1.0 if name == "hangs" else 30.0) for name, (line, _) in FAULTS.items()]
    # The step that hangs comes first, and uses up the time.
    status, found, text = report(*faulty, plan("is sound", SOUND))
    assert status == 1
    outcomes = {name: result["outcome"] for name, result in found.items()}
    expected = {name: outcome for name, (_, outcome) in FAULTS.items()}
    assert outcomes == {**expected, "is sound": "passed"}
    # The step that hangs may have been ended before it recorded its check.
    for name in FAULTS.keys() - {"does not parse", "hangs"}:
        assert found[name]["checks"][0]["name"] == "begins", name
    assert all(f"| {name} | {outcomes[name]} |" in text for name in outcomes)
    assert "Failed: **one is two**\n\n```text\ngot 1\n```" in text


def test_a_step_that_reaches_its_limit_leaves_its_records_and_no_process(plan, report, tmp_path, monkeypatch):
    left = tmp_path / "left"
    child = f"import os, time; open({str(left)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    text = source(f"import subprocess; subprocess.Popen([sys.executable, '-c', {child!r}]).wait()")

    class Popen(subprocess.Popen):
        def wait(self, timeout=None):
            if timeout == runner.KILL_SECONDS:
                return super().wait(timeout)
            # The limit expires only once the child runs, however busy the machine is.
            wait_until(lambda: left.exists() and left.read_text())
            raise subprocess.TimeoutExpired("step", timeout)

    monkeypatch.setattr(runner, "current_commit", lambda: "abc1234567")
    monkeypatch.setattr(runner.subprocess, "Popen", Popen)
    status, found, _ = report(plan("starts others", text, 2.0))
    assert status == 1
    assert found["starts others"]["outcome"].startswith("ended at its limit of ")
    assert found["starts others"]["checks"] == [{"name": "begins", "passed": True, "detail": ""}]
    assert is_gone(int(left.read_text()))


def wait_until(holds) -> bool:
    end = time.monotonic() + WAIT_SECONDS
    while not (found := holds()) and time.monotonic() < end:
        time.sleep(0.01)
    return bool(found)


def is_gone(pid: int) -> bool:
    """Whether a process ends; an orphan stays in the process table until it is reaped."""

    def has_ended():
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    return wait_until(has_ended)


def test_a_second_call_repeats_only_the_steps_that_it_names(plan, report):
    first, second = plan("first", SOUND), plan("second", source("step.check('holds', False)"))
    status, before, _ = report(first, second)
    assert status == 1
    status, after, text = report(plan("second", SOUND), known=[first, plan("third", SOUND)])
    assert status == 0
    assert after["first"] == before["first"]
    assert after["second"]["outcome"] == "passed"
    assert "Not run yet: third." in text


def test_a_step_that_checks_nothing_has_not_passed(plan, report):
    status, found, _ = report(plan("idles", "def run(step):\n    step.figure('two', 2.0)\n"))
    assert status == 1
    assert found["idles"]["outcome"] == "checked nothing"


def test_a_step_that_may_fail_is_shown_and_does_not_change_the_exit_status(plan, report):
    status, found, text = report(plan("may", source("step.check('holds', False)"), may_fail=True))
    assert status == 0
    assert found["may"]["outcome"] == "1 of 2 checks failed"
    assert "| may | 1 of 2 checks failed (may fail) |" in text


def test_an_attempt_that_raises_is_a_failed_check_and_the_step_goes_on(plan, report):
    text = "def run(step):\n    with step.attempt('divides'):\n        1 / 0\n    step.check('goes on', True)\n"
    _, found, _ = report(plan("tries", text))
    divides, goes_on = found["tries"]["checks"]
    assert not divides["passed"]
    assert divides["detail"].endswith("ZeroDivisionError: division by zero\n")
    assert goes_on["passed"]


def test_a_plant_is_entered_around_the_step_and_named_in_the_report(plan, report, tmp_path):
    (tmp_path / "some_plants.py").write_text(
        "import os\nfrom contextlib import contextmanager\n"
        "@contextmanager\ndef wrong():\n    os.environ['WRONG'] = '1'\n    yield\n"
    )
    one = plan("looks", "import os\ndef run(step):\n    step.check('all is right', 'WRONG' not in os.environ)\n")
    status, found, text = report(one, plant="some_plants:wrong")
    assert (status, found["looks"]["outcome"]) == (1, "1 of 1 checks failed")
    assert "**Planted faults** in looks (some_plants:wrong)." in text


TESTS = """
import pytest
def test_passes(): pass
@pytest.mark.cuda
def test_is_left_out(): assert False
def test_fails(): assert 1 == 2
@pytest.fixture
def broken(): raise OSError("no such device")
def test_breaks(broken): pass
@pytest.mark.skip(reason="one device")
def test_is_skipped(): pass
"""


def test_each_test_that_fails_on_a_gpu_is_a_failed_check(plan, report, tmp_path):
    folder = tmp_path / "gpu"
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    cuda: needs a CUDA device\n")
    texts = {
        "some": TESTS,
        "sound": "def test_passes(): pass",
        "skipped": "import pytest\n@pytest.mark.skip(reason='one device')\ndef test_is_skipped(): pass",
        "unsound": "import no_such_module",
    }
    for name, text in texts.items():
        (folder / f"test_{name}.py").write_text(text)
    text = "from pathlib import Path\nfrom gpu_report.steps import tests\nrun = tests.run\n"
    text += f"tests.FOLDER = Path({str(folder)!r})\n"
    _, found, _ = report(plan("tests", text))
    checks = {check["name"]: check for check in found["tests"]["checks"]}
    failed = [name for name, check in checks.items() if not check["passed"]]
    assert failed == [
        "test_unsound.py",
        "all tests of test_skipped.py pass",
        "test_some.py::test_fails",
        "test_some.py::test_breaks",
        "all tests of test_some.py pass",
    ]
    assert "assert 1 == 2" in checks["test_some.py::test_fails"]["detail"]
    assert "no such device" in checks["test_some.py::test_breaks"]["detail"]
    assert checks["all tests of test_some.py pass"]["detail"] == "1 passed, 2 failed, 1 skipped"
    assert checks["all tests of test_sound.py pass"]["passed"]
    assert found["tests"]["notes"] == ["2 skipped: one device"]


@pytest.mark.parametrize(
    ("begun", "lasts", "expected"),
    [(0.0, 0.0, [70.0, 100.0, 110.0]), (0.0, 1000.0, [70.0, 30.0, 10.0]), (-100.0, 0.0, [50.0, 30.0, 10.0])],
    ids=["ends at once", "runs to its limit", "starts late"],
)
def test_a_step_has_its_share_and_the_time_that_earlier_steps_have_left(monkeypatch, begun, lasts, expected):
    now, limits = [0.0], []
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(runner, "SPARE_SECONDS", 40.0)

    def run(_runner, _plan, limit, *_):
        limits.append(limit)
        now[0] += min(lasts, limit)

    monkeypatch.setattr(Runner, "_run", run)
    Runner(seconds=240.0, begun=begun).run([Plan("a", 100), Plan("b", 60), Plan("c", 20)], lambda *_: None)
    assert limits == expected


def on_path() -> dict[str, str]:
    """An environment in which the script finds this Python, whose packages it needs."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("status", "has"),
    [(0, True), (program.NO_DEVICE, False), (-11, True), (1, True)],
    ids=["a device", "no device", "crash", "error"],
)
def test_a_device_is_missing_only_if_torch_says_so(monkeypatch, status, has):
    monkeypatch.setattr(program.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=status))
    assert program.has_device() is has


def event(name, begin, end, device=DeviceType.CPU, is_user_annotation=False):
    span = SimpleNamespace(start=begin, end=end, elapsed_us=lambda: end - begin)
    return SimpleNamespace(name=name, time_range=span, device_type=device, is_user_annotation=is_user_annotation)


def test_counts_are_per_run_and_leave_out_what_the_profiler_adds():
    host = [
        event("cudaDeviceSynchronize", 0, 5),
        event(measuring.RANGE, 10, 100),
        event("aten::_local_scalar_dense", 20, 40),
        event("cudaMemcpyAsync", 21, 22),
        event("cudaStreamSynchronize", 23, 39),
        event("cudaLaunchKernel", 50, 51),
        event("cudaEventSynchronize", 60, 61),
        event("cudaEventQuery", 62, 63),
        event("cudaStreamWaitEvent", 64, 65),
        event("cudaDeviceSynchronize", 110, 115),
    ]
    device = [
        event(measuring.RANGE, 10, 100, DeviceType.CUDA, is_user_annotation=True),
        event("Memcpy DtoH (Device -> Pageable)", 30, 31, DeviceType.CUDA),
        event("Memcpy DtoD (Device -> Device)", 32, 34, DeviceType.CUDA),
        event("Memset (Device)", 35, 36, DeviceType.CUDA),
        event("void batch_norm_collect_statistics_kernel", 52, 56, DeviceType.CUDA),
        event("ncclDevKernel_AllGather_RING_LL", 105, 107, DeviceType.CUDA),
    ]
    found = measuring._counts([*host, *device], 2, on_cuda=True)
    assert found == measuring.Counts(launches=1.5, copies=1.0, to_host=0.5, waits=1.0, busy=5.0)
