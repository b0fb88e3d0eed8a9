"""The page in a real browser while four ranks train under torchrun, with a fault planted in one of them."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlencode

import pytest

from server.cli.status import ask
from statsd_bn.errors import ServerUnreachable
from support.browser import (
    SHOWN_SECONDS,
    START_SECONDS,
    TOKEN,
    axe_source,
    browser,
    errors,
    open_page,
    show,
    text,
    violations,
    wait_for,
    wait_until,
)
from support.launched import Launched, free_port
from support.paths import ROOT, TESTS

RANKS = 4
PROGRAM = TESTS / "programs/resnet/train.py"

# The server reports a straggler after half a minute of warm-up and a full minute; the machine may be slow.
KNOWN_SECONDS = 170.0

# Seconds of training that the charts of a screenshot show.
PICTURE_SECONDS = 30.0 if os.environ.get("STATSD_BN_SCREENSHOTS") else 1.0

pytestmark = [pytest.mark.alone, pytest.mark.processes, pytest.mark.long, pytest.mark.timeout(400)]


@contextmanager
def process(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "STATSD_BN_VIEW_TOKEN": TOKEN}
    command = [sys.executable, "-m", "server", *arguments]
    started = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    try:
        yield started
    finally:
        started.kill()
        started.wait()


class Training:
    """A server, four ranks that train, and the page."""

    def __init__(self, stack, folder, driver):
        self.stack, self.driver = stack, driver
        self.endpoint, self.fault = f"ipc://{folder}/s", folder / "fault"
        self.fault.write_text("none")
        self.server = stack.enter_context(process("--bind", self.endpoint))
        self.folder = folder

    def start(self, fault="none"):
        self.plant(fault)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        environ = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(PROGRAM.parent)]), "OMP_NUM_THREADS": "1"}
        port = free_port()
        self.knows(lambda _: True)
        self.stack.enter_context(process("view", self.endpoint, "--http", f"127.0.0.1:{port}"))
        run = Launched([*command, PROGRAM, self.endpoint, self.fault], environ, self.folder / "errors")
        self.stack.enter_context(run)
        show(self.driver)
        open_page(self.driver, port)
        self.knows(is_complete)
        wait_until(self.driver, lambda: len(self.rows()) == RANKS, "no rows", START_SECONDS)

    def plant(self, fault):
        (self.folder / "next").write_text(fault)
        (self.folder / "next").replace(self.fault)

    def restart_server(self):
        self.server.kill()
        self.server.wait()
        wait_for(self.driver, "no answer since", "#live", 10)
        self.server = self.stack.enter_context(process("--bind", self.endpoint))

    def rows(self):
        return self.driver.find_elements("css selector", "#ranks tbody tr")

    def layers(self):
        """Names of the layers in the order of the map."""
        (group,) = ask(self.endpoint)["groups"]
        script = "const [url, done] = arguments; fetch(url).then((it) => it.json()).then((heat) => done(heat.layers));"
        return self.driver.execute_async_script(script, f"/heat?{urlencode({n: group[n] for n in ('job', 'group')})}")

    def pid(self, rank):
        (group,) = ask(self.endpoint)["groups"]
        return int(re.search(r"pid (\d+)", group["members"][rank]["place"])[1])

    def knows(self, holds, seconds=START_SECONDS):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with suppress(ServerUnreachable):
                if holds(ask(self.endpoint)):
                    return
            time.sleep(0.02)
        pytest.fail(f"no report of the server met the condition within {seconds} s")

    def shows(self, pattern):
        """Waits until the banner matches a pattern, for two seconds at most; call it after `knows`."""
        banner = lambda: text(self.driver, "#banner")  # noqa: E731 - used twice
        wait_until(self.driver, lambda: re.search(pattern, banner()), f"no {pattern!r} in {banner()!r}")


def is_complete(report):
    return any(len(one["members"]) == one["world_size"] for one in report["groups"])


def has(field):
    return lambda report: any(group.get(field) for group in report["groups"])


def has_finding(kind):
    return lambda report: any(one["kind"] == kind for group in report["groups"] for one in group.get("findings", ()))


def is_over(report):
    return report["ended"] or any(one["lost"] for one in report["groups"])


@pytest.fixture(scope="module")
def chromium():
    with browser() as driver:
        yield driver


@pytest.fixture(scope="module")
def axe(tmp_path_factory):
    return axe_source(tmp_path_factory.mktemp("axe"))


@pytest.fixture
def training(chromium, tmp_path):
    with ExitStack() as stack:
        yield Training(stack, tmp_path, chromium)
        chromium.get("about:blank")  # before the view ends
        chromium.get_log("browser")


def check(training, axe, state=""):
    """Asserts that the console has no error and axe no violation, and takes pictures."""
    driver = training.driver
    assert errors(driver) == []
    if axe:
        assert violations(driver, axe) == []
    folder = os.environ.get("STATSD_BN_SCREENSHOTS") or training.folder
    for scheme in ("light", "dark"):
        show(driver, prefers_color_scheme=scheme)
        height = driver.execute_script("return document.querySelector('footer').getBoundingClientRect().bottom")
        show(driver, height=int(height), prefers_color_scheme=scheme)
        driver.save_screenshot(str(Path(folder) / "-".join(filter(None, ["view", state, f"{scheme}.png"]))))
    show(driver)


def test_healthy(training, axe):
    training.start()
    training.shows(r"Healthy")
    time.sleep(2 * PICTURE_SECONDS)
    training.shows(r"Healthy")
    check(training, axe, "healthy")


def test_a_slow_rank(training, axe):
    training.start("slow")
    training.knows(has_finding("straggler"), KNOWN_SECONDS)
    training.shows(r"(?s)Rank 1 .*slow.*waited \d\d%")
    assert "slow" in text(training.driver, "[data-rank='1'] th")
    check(training, axe, "slow")


def test_tripled_inputs(training, axe):
    training.start()
    time.sleep(PICTURE_SECONDS)
    training.plant("tripled")
    training.knows(has_finding("skew"), KNOWN_SECONDS)
    training.shows(r"(?s)Rank 1.*data.*times.* in bn1\b")
    assert training.layers()[:3] == ["bn1", "layer1.0.bn1", "layer1.0.bn2"]
    assert "differs" in text(training.driver, "[data-rank='1'] th")
    wait_for(training.driver, "rank 1", "#reading")
    time.sleep(PICTURE_SECONDS)
    check(training, axe)  # the picture of README


def test_nan(training, axe):
    training.start("nan")
    training.knows(has("non_finite"))
    training.shows(r"(?s)Rank 2.*NaN.*layer1\.0\.bn2.*step 20")
    time.sleep(PICTURE_SECONDS)
    check(training, axe, "nan")


def test_a_rank_that_hangs_in_its_loader(training, axe):
    training.start()
    time.sleep(PICTURE_SECONDS)
    training.plant("hung")
    training.knows(lambda report: any(one["seconds"] > 3 for group in report["groups"] for one in group["waiting"]))
    training.shows(r"(?s)Waiting.*rank 3 .*for \d+ s")
    wait_for(training.driver, "loader.py", "#banner", 10)
    check(training, axe, "waiting")


def test_a_killed_rank(training, axe):
    training.start()
    time.sleep(PICTURE_SECONDS)
    os.kill(training.pid(3), signal.SIGKILL)
    training.knows(is_over)
    training.shows(r"(?s)Broken: rank 3 ")
    time.sleep(3 * SHOWN_SECONDS)  # all ranks end, and the page keeps their last state
    training.shows(r"(?s)Broken: rank 3 .*Hide this job")
    assert len(training.rows()) == RANKS
    check(training, axe, "killed")


def test_a_frozen_rank(training, axe):
    training.start()
    time.sleep(PICTURE_SECONDS)
    os.kill(training.pid(2), signal.SIGSTOP)
    training.knows(is_over)
    training.shows(r"(?s)Broken: rank 2 ")
    check(training, axe, "frozen")


def test_a_server_that_starts_again(training, axe):
    training.start()
    time.sleep(PICTURE_SECONDS)
    before = ask(training.endpoint)["server"]
    training.restart_server()
    training.knows(lambda report: report["server"] != before and is_complete(report))
    training.shows(r"(?s)restarted")
    check(training, axe, "restarted")
