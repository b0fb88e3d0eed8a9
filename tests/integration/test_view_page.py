"""The page in a real browser, while four ranks train. `scripts/browser-test` installs what it needs."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

import pytest

pytest.importorskip("selenium", reason="needs selenium; scripts/browser-test installs it")
pytest.importorskip("uvicorn", reason="needs the extra view")
if not shutil.which("chromedriver"):
    pytest.skip("needs chromium and chromedriver; scripts/browser-test installs them", allow_module_level=True)

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from support.paths import ROOT
from support.ports import free_port

# The view asks once a second, and the page has a second more.
SHOWN_SECONDS = 2.0

# Until four processes have imported torch on a busy machine.
START_SECONDS = 25.0

SIZES = {"light": ("light", 1200), "dark": ("dark", 1200), "phone": ("light", 390)}

pytestmark = [pytest.mark.alone, pytest.mark.processes]


@contextmanager
def process(*arguments):
    started = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stderr=subprocess.DEVNULL)
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


def picture(driver, folder, name):
    scheme, width = SIZES[name]
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.save_screenshot(str(folder / f"view-{name}.png"))
    assert driver.execute_script("return document.documentElement.scrollWidth <= innerWidth"), (
        f"{name} scrolls sideways"
    )


def open_page(driver, port):
    for attempt in count():
        try:
            driver.get(f"http://127.0.0.1:{port}/")
        except Exception:
            if attempt > START_SECONDS:
                raise
            time.sleep(0.5)  # until the view listens
        else:
            return


def test_a_browser_shows_a_training_as_it_goes(tmp_path):
    folder = Path(os.environ.get("STATSD_BN_SCREENSHOTS") or tmp_path)
    endpoint, port = f"tcp://127.0.0.1:{free_port()}", free_port()
    serve = ("-m", "server", "--bind", endpoint)
    with ExitStack() as stack:
        server = stack.enter_context(process(*serve))
        program = str(ROOT / "tests/programs/view_program.py")
        ranks = [stack.enter_context(process(program, str(rank), endpoint)) for rank in range(4)]
        driver = stack.enter_context(browser())
        stack.enter_context(process("-m", "server", "view", endpoint, "--http", f"127.0.0.1:{port}"))
        open_page(driver, port)
        wait_for(driver, "4 of 4 ranks", START_SECONDS)
        assert "Job <script>alert(1)</script>" in text(driver)
        rows = driver.find_elements(By.CSS_SELECTOR, "tr[data-rank]")
        assert [row.get_attribute("data-rank") for row in rows] == ["0", "1", "2", "3"]
        assert all(f"pid {rank.pid}" in row.text for rank, row in zip(ranks, rows, strict=True))
        wait_for(driver, "first non-finite: layer 2, forward, step 20, rank 2 (", START_SECONDS)
        for name in SIZES:
            picture(driver, folder, name)
        server.kill()
        server.wait()
        stack.enter_context(process(*serve))
        wait_for(driver, "the server started again", START_SECONDS)
        wait_for(driver, "4 of 4 ranks", START_SECONDS)
        ranks[3].send_signal(signal.SIGKILL)
        ranks[3].wait()
        # The others end at once, so the job may have ended before the view asks again.
        wait_for(driver, "lost: <script>alert(1)</script>: rank 3", SHOWN_SECONDS)
        errors = [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
        assert errors == []
