"""The page in a real browser, while four ranks train. `scripts/test browser` installs the browser."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPConnection
from itertools import count
from pathlib import Path

import pytest

pytest.importorskip("selenium", reason="needs selenium; scripts/test browser installs it")
pytest.importorskip("uvicorn", reason="needs the extra view")
if not shutil.which("chromedriver"):
    pytest.skip("needs chromium and chromedriver; scripts/test browser installs them", allow_module_level=True)

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from server.cli.status import ask
from server.view.snapshot import SnapshotBuilder
from server.view.web import MAX_STREAMS
from statsd_bn.errors import ServerUnreachable
from support.launched import free_port
from support.paths import ROOT
from support.view_reports import group, member, report

# From when the server knows it: the view asks once a second, and the page has a second more.
SHOWN_SECONDS = 2.0

# Until the server knows it: four processes import torch first, maybe on a busy machine.
START_SECONDS = 40.0

# A picture is taken behind the drawing anew that a change of size brings.
DRAWN_SECONDS = 0.5

TOKEN = "of-the-test-0123"  # noqa: S105 - it opens nothing

SIZES = {"light": ("light", 800), "dark": ("dark", 800), "phone": ("light", 390)}

pytestmark = [pytest.mark.alone, pytest.mark.processes]


@contextmanager
def process(*arguments):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "STATSD_BN_VIEW_TOKEN": TOKEN,
    }
    started = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    try:
        yield started
    finally:
        started.kill()
        started.wait()


@contextmanager
def browser():
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.binary_location = shutil.which("chromium")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def text(driver):
    return driver.find_element(By.TAG_NAME, "body").text


def wait_for(driver, fact, seconds):
    WebDriverWait(driver, seconds, poll_frequency=0.05).until(
        lambda _: fact in text(driver), f"no {fact!r} on the page"
    )


def wait_for_server(endpoint, knows):
    """Wait until the report fulfils a condition; returns the condition's value."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        with suppress(ServerUnreachable):
            if found := knows(ask(endpoint)):
                return found
        time.sleep(0.02)
    pytest.fail("the server never came to know it")


def of_group(field):
    return lambda report: [told for one in report["groups"] for told in one.get(field, ())]


def wait_for_soon(driver, endpoint, knows, fact):
    """It is on the page within two seconds of when the server came to know it."""
    found = wait_for_server(endpoint, knows)
    wait_for(driver, fact, SHOWN_SECONDS)
    return found


def picture(driver, folder, name, of="view", height=540):
    scheme, width = SIZES[name]
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    time.sleep(DRAWN_SECONDS)
    driver.save_screenshot(str(folder / f"{of}-{name}.png"))
    assert driver.execute_script("return document.documentElement.scrollWidth <= innerWidth"), (
        f"{name} scrolls sideways"
    )


def open_page(driver, port):
    for attempt in count():
        try:
            driver.get(f"http://127.0.0.1:{port}/?token={TOKEN}")
        except Exception:
            if attempt > START_SECONDS:
                raise
            time.sleep(0.5)  # until the view listens
        else:
            return


def are_all_there(report):
    return any(len(one["members"]) == one["world_size"] for one in report["groups"])


def is_over(report):
    return report["ended"] or any(one["lost"] for one in report["groups"])


def test_a_browser_shows_a_training_as_it_goes(tmp_path):
    folder = Path(os.environ.get("STATSD_BN_SCREENSHOTS") or tmp_path)
    endpoint, port = f"ipc://{tmp_path}/s", free_port()
    serve = ("-m", "server", "--bind", endpoint)
    with ExitStack() as stack:
        server = stack.enter_context(process(*serve))
        program = str(ROOT / "tests/programs/view_program.py")
        ranks = [stack.enter_context(process(program, str(rank), endpoint)) for rank in range(4)]
        driver = stack.enter_context(browser())
        stack.enter_context(process("-m", "server", "view", endpoint, "--http", f"127.0.0.1:{port}"))
        open_page(driver, port)
        wait_for_soon(driver, endpoint, are_all_there, "4 of 4 ranks")
        assert "Job <script>alert(1)</script>" in text(driver)
        rows = driver.find_elements(By.CSS_SELECTOR, "tr[data-rank]")
        assert [row.get_attribute("data-rank") for row in rows] == ["0", "1", "2", "3"]
        assert all(f"pid {rank.pid}" in row.text for rank, row in zip(ranks, rows, strict=True))
        non_finite = "first non-finite: layer '2', forward, step 20, rank 2 ("
        wait_for_soon(driver, endpoint, of_group("non_finite"), non_finite)
        skewed = f"rank 1 ({socket.gethostname()}, pid {ranks[1].pid}): input "
        (finding,) = wait_for_soon(driver, endpoint, of_group("findings"), skewed)
        assert (finding["kind"], finding["rank"], finding["layer"]) == ("skew", 1, "0")
        wait_for(driver, "5 layers, 4 ranks: 5 layers with a rank that stands out", SHOWN_SECONDS)
        high = [row.get_attribute("data-high") for row in driver.find_elements(By.CSS_SELECTOR, ".cells tbody tr")]
        assert high == ["1"] * 5
        for name in SIZES:
            picture(driver, folder, name)
        before = ask(endpoint)["server"]
        server.kill()
        server.wait()
        stack.enter_context(process(*serve))
        is_another = lambda report: report["server"] != before  # noqa: E731 - it is said once
        wait_for_soon(driver, endpoint, is_another, "the server started again")
        wait_for_soon(driver, endpoint, are_all_there, "4 of 4 ranks")
        ranks[3].send_signal(signal.SIGKILL)
        ranks[3].wait()
        # The others end at once, so the job may have ended before the view asks again.
        wait_for_soon(driver, endpoint, is_over, "lost: <script>alert(1)</script>: rank 3")
        assert errors(driver) == []


def errors(driver):
    return [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]


def test_a_skewed_rank_is_seen():
    port, job = free_port(), "<script>alert(1)</script>"
    with ExitStack() as stack:
        program = str(ROOT / "tests/programs/heat_program.py")
        stack.enter_context(process(program, f"127.0.0.1:{port}", job))
        driver = stack.enter_context(browser())
        open_page(driver, port)
        wait_for(driver, "most in layer4.1.bn2, rank 5 with 0.3", SHOWN_SECONDS)
        assert f"Layers of job {job}, group world" in text(driver)
        rows = driver.find_elements(By.CSS_SELECTOR, ".cells tbody tr")
        assert len(rows) == 20
        assert [row.get_attribute("data-high") for row in rows] == ["5"] * 13 + [""] * 7  # most skewed layers first
        assert errors(driver) == []


def test_the_heat_map_follows_within_two_seconds(tmp_path):
    port, odd = free_port(), tmp_path / "odd"
    odd.write_text("5")
    with ExitStack() as stack:
        program = str(ROOT / "tests/programs/heat_program.py")
        stack.enter_context(process(program, f"127.0.0.1:{port}", "digits", "20", "8", str(odd)))
        driver = stack.enter_context(browser())
        open_page(driver, port)
        wait_for(driver, "rank 5 with", SHOWN_SECONDS)
        for rank in (1, 2, 3, 4, 6, 7):
            time.sleep(1 + rank / 8)  # whatever the page asks for each second or two, it comes between two of them
            (tmp_path / "next").write_text(str(rank))
            (tmp_path / "next").replace(odd)
            wait_for(driver, f"rank {rank} with", SHOWN_SECONDS)


def test_with_several_jobs_the_reader_stays_at_the_ranks_of_one():
    snapshot = SnapshotBuilder("tcp://x:1").update(1.0, report(group(member(0)), group(member(0), job="other")))
    port = free_port()
    with ExitStack() as stack:
        stack.enter_context(process(str(ROOT / "tests/programs/heat_program.py"), f"127.0.0.1:{port}", "job"))
        driver = stack.enter_context(browser())
        open_page(driver, port)
        script = """
            source.close();
            draw(arguments[0]);
            const tables = () => [...document.querySelectorAll("#jobs .scroll")];
            tables()[0].focus();
            draw(arguments[0]);
            return tables().indexOf(document.activeElement);
        """
        assert driver.execute_script(script, snapshot) == 0


def test_with_too_many_readers_the_page_reports_it_and_retries():
    port = free_port()
    with ExitStack() as stack:
        stack.enter_context(process(str(ROOT / "tests/programs/heat_program.py"), f"127.0.0.1:{port}", "digits"))
        driver = stack.enter_context(browser())
        open_page(driver, port)
        driver.execute_script("source.close()")
        with ExitStack() as readers:
            for _ in range(MAX_STREAMS):
                reader = readers.enter_context(closing(HTTPConnection("127.0.0.1", port)))
                reader.request("GET", "/events", headers={"Authorization": f"Bearer {TOKEN}"})
                assert readers.enter_context(reader.getresponse()).status == 200
            driver.refresh()
            wait_for(driver, f"the view says: too many readers: {MAX_STREAMS} are connected", SHOWN_SECONDS)
        wait_for(driver, "Job digits", START_SECONDS)
        assert "too many readers" not in text(driver)
