"""A headless Chromium that shows the page, and axe-core, which npm installs into a temporary folder.

Tests that import this module are skipped without a browser, which `scripts/test browser` installs.
"""

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("selenium", reason="needs selenium; scripts/test browser installs it")
pytest.importorskip("uvicorn", reason="needs the extra view")
if not shutil.which("chromedriver"):
    pytest.skip("needs chromium and chromedriver; scripts/test browser installs them", allow_module_level=True)

from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from server.view.web import MAX_STREAMS

# Tests import these from here, because only this module skips them if selenium is missing.
__all__ = ["MAX_STREAMS", "ActionChains", "By", "Keys", "Select"]

TOKEN = "of-the-test-0123"  # noqa: S105 - no secret

# How soon the page shows an event of the server: the view requests a report once a second, and the page gets another
# second to draw it.
SHOWN_SECONDS = 2.0

# For the start of a process on a busy machine.
START_SECONDS = 60.0

AXE = "axe-core@4.14.1"
INSTALL_SECONDS = 60.0

# Wait for the page to redraw after a change of its size.
DRAWN_SECONDS = 0.4


@contextmanager
def browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    options.binary_location = shutil.which("chromium") or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver") or ""))
    try:
        yield driver
    finally:
        driver.quit()


def open_page(driver: webdriver.Chrome, port: int) -> None:
    until = time.monotonic() + START_SECONDS
    while True:
        try:
            driver.get(f"http://127.0.0.1:{port}/?token={TOKEN}")
        except Exception:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)  # the view does not listen yet
        else:
            return


def text(driver: webdriver.Chrome, selector: str = "body") -> str:
    """The visible text, with plain blanks in place of narrow ones."""
    found = driver.find_element(By.CSS_SELECTOR, selector).text
    return found.replace("\u202f", " ").replace("\u00a0", " ").replace("\u2009", " ")


def texts(driver: webdriver.Chrome, selector: str) -> list[str]:
    return [one.text for one in driver.find_elements(By.CSS_SELECTOR, selector)]


def wait_until(driver: webdriver.Chrome, holds: Callable[[], Any], what: str, seconds: float = SHOWN_SECONDS) -> Any:
    ignored = {"ignored_exceptions": [Exception]}  # an element may be replaced while it is read
    return WebDriverWait(driver, seconds, poll_frequency=0.05, **ignored).until(lambda _: holds(), what)


def wait_for(driver: webdriver.Chrome, fact: str, selector: str = "body", seconds: float = SHOWN_SECONDS) -> None:
    try:
        wait_until(driver, lambda: fact in text(driver, selector), "", seconds)
    except TimeoutException as error:
        raise AssertionError(f"no {fact!r} in {selector}: {text(driver, selector)!r}") from error


def errors(driver: webdriver.Chrome) -> list[dict[str, Any]]:
    return [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]


def show(driver: webdriver.Chrome, width: int = 1280, height: int = 900, scale: float = 1, **media: str) -> None:
    features = [{"name": name.replace("_", "-"), "value": value} for name, value in media.items()]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    time.sleep(DRAWN_SECONDS)


def scrolls_sideways(driver: webdriver.Chrome) -> bool:
    return driver.execute_script("return document.documentElement.scrollWidth > innerWidth")


def axe_source(folder: Path) -> str:
    """The script of axe-core, or "" where npm cannot install it."""
    command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), AXE]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=INSTALL_SECONDS)
        return (folder / "node_modules/axe-core/axe.min.js").read_text()
    except (OSError, subprocess.SubprocessError):
        return ""


def violations(driver: webdriver.Chrome, axe: str) -> list[str]:
    """Rules of axe-core that the page violates, each with its first element."""
    driver.execute_script(axe)
    found = driver.execute_async_script(
        "const done = arguments[0]; axe.run().then(({ violations }) => done(violations))"
    )
    return [f"{one['id']} ({one['help']}): {one['nodes'][0]['html']}" for one in found]
