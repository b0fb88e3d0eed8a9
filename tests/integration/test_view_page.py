"""The page in a real browser, with a pretended server in every state. `scripts/test browser` installs the browser."""

import json
import os
import re
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection

import pytest

from support.browser import (
    MAX_STREAMS,
    START_SECONDS,
    TOKEN,
    ActionChains,
    By,
    Keys,
    Select,
    axe_source,
    browser,
    errors,
    open_page,
    scrolls_sideways,
    show,
    text,
    texts,
    violations,
    wait_for,
    wait_until,
)
from support.launched import free_port
from support.paths import ROOT
from support.view_states import ADVICE, HOSTILE, STATES, TEXTS, layer_names

# A redraw that takes longer than a few frames is noticeable.
REDRAW_MILLISECONDS = 60.0

WIDTHS = (1280, 390)

pytestmark = [pytest.mark.alone, pytest.mark.processes]


@contextmanager
def page_server(folder, port, state):
    file = folder / "state.json"

    def change(state, **more):
        (folder / "next").write_text(json.dumps({"state": state, **more}))
        (folder / "next").replace(file)

    change(**state)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    program = str(ROOT / "tests/programs/page_program.py")
    started = subprocess.Popen([sys.executable, program, f"127.0.0.1:{port}", str(file)], cwd=ROOT, env=environment)
    try:
        yield change
    finally:
        started.kill()
        started.wait()


@pytest.fixture(scope="module")
def chromium():
    with browser() as driver:
        yield driver


@pytest.fixture(scope="module")
def axe(tmp_path_factory):
    return axe_source(tmp_path_factory.mktemp("axe")) or pytest.skip("needs npm and its registry for axe-core")


@pytest.fixture
def open_view(chromium, tmp_path):
    with ExitStack() as stack:

        def open_(state="healthy", **more):
            port = free_port()
            change = stack.enter_context(page_server(tmp_path, port, {"state": state, **more}))
            show(chromium)
            open_page(chromium, port)
            wait_until(chromium, lambda: text(chromium, "#banner h2"), "no banner")
            return change

        yield open_
        found = errors(chromium)
        chromium.get("about:blank")  # before the view ends
    assert found == []


def heading(state):
    return re.split(r"[:;{]| for ", TEXTS[state])[0]


def test_banner_list_title_and_spoken_text_agree_in_every_state(chromium, open_view):
    change = open_view(others=["unet"])
    for state in STATES:
        change(state, others=["unet"])
        wait_for(chromium, heading(state), "#banner h2", 5)
        for of in ("#jobs [aria-current]", "#spoken", "title"):
            found = chromium.execute_script("return document.querySelector(arguments[0]).textContent", of)
            assert heading(state) in found.replace("\u00a0", " "), of
        assert ADVICE.get(state, "") in text(chromium, "#banner")
        assert errors(chromium) == [], state


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_in_any_state_and_nothing_scrolls_sideways(chromium, open_view, axe, scheme):
    change = open_view()
    for state in [*STATES, "empty"]:
        change(state, others=() if state == "empty" else ["unet", "z" * 200])
        wait_for(chromium, heading(state) if state in TEXTS else "No job yet", "#banner h2", 5)
        for width in WIDTHS:
            show(chromium, width, prefers_color_scheme=scheme)
            assert violations(chromium, axe) == [], (state, width)
            assert not scrolls_sideways(chromium), (state, width)


def test_at_200_percent_and_with_many_ranks_nothing_scrolls_sideways(chromium, open_view):
    open_view("slow", ranks=64, layers=151)
    for width, scale in ((640, 2), (390, 3), (1600, 1), (320, 1)):
        show(chromium, width, scale=scale)
        assert not scrolls_sideways(chromium), width


def test_the_rows_of_the_ranks_have_all_their_numbers(chromium, open_view):
    open_view("waiting")
    rows = chromium.find_elements(By.CSS_SELECTOR, "#ranks tbody tr")
    assert [row.get_attribute("data-rank") for row in rows] == [str(rank) for rank in range(8)]
    row = rows[1].text.replace("\u202f", " ").replace("\u00a0", " ")
    facts = ("awaited", "gpu-a, pid 12271", "31%", "14 230", "1.8", "2.6 / 10 ms", "0.32 / 2.6 ms", "in loader.py:41")
    for fact in facts:
        assert fact in row, row


def test_of_64_ranks_the_flagged_ranks_come_first_and_a_button_shows_all(chromium, open_view):
    open_view("slow", ranks=64, layers=151)

    def ranks():
        return [row.get_attribute("data-rank") for row in chromium.find_elements(By.CSS_SELECTOR, "[data-rank]")]

    assert (len(ranks()), ranks()[:3]) == (16, ["1", "2", "0"])
    assert "Show all 64 ranks" in text(chromium, "#ranks")
    chromium.find_element(By.ID, "more-ranks").click()
    assert ranks() == [str(rank) for rank in range(64)]
    chromium.find_element(By.ID, "more-ranks").click()


def test_finding_and_map_name_the_same_rank_and_layer(chromium, open_view):
    change = open_view("data")
    wait_for(chromium, "bn1: ", "#reading", 5)
    assert "27% comes from rank 2, which varies 8.5 times as much" in text(chromium, "#reading")
    assert "vary 8.5 times as much" in text(chromium, "#banner h2")
    assert hot(chromium) == {2}
    change("healthy")
    wait_for(chromium, "spread evenly", "#reading", 5)
    assert hot(chromium) == set()


def test_a_layer_with_nan_does_not_claim_that_its_ranks_agree(chromium, open_view):
    change = open_view("healthy")
    wait_for(chromium, "spread evenly", "#reading", 5)
    change("nan")
    name = layer_names(53)[2]
    wait_for(chromium, f"{name}: NaN at step 20; its latest finite values: ", "#reading", 5)
    chromium.find_element(By.ID, "scrub").send_keys(Keys.HOME)
    wait_for(chromium, "bn1: its latest finite values (first NaN at step 20): ", "#reading")


@pytest.mark.parametrize(
    ("state", "pattern"),
    [
        ("data", r"since step 64, about \d\d:\d\d:\d\d \(1[01] min\)"),
        ("slow", r"since about \d\d:\d\d:\d\d \(3 min\)"),
        ("nan", r"since step 20; noticed \d\d:\d\d:\d\d \(2 min\)"),
        ("waiting", r"since \d\d:\d\d:\d\d \(1\d s\)"),
    ],
)
def test_the_banner_says_since_when(chromium, open_view, state, pattern):
    open_view(state)
    assert re.search(rf"^{pattern}$", text(chromium, "#banner .facts"), re.MULTILINE)


def test_a_malformed_link_shows_the_job_that_needs_attention(chromium, open_view):
    open_view("waiting", others=["unet"])
    chromium.execute_script("location.hash = '#%E0%A4%A'")
    wait_for(chromium, "resnet50", "#banner .job")
    time.sleep(1.0)  # until the page is drawn again
    assert errors(chromium) == []


def test_a_long_path_of_the_server_is_its_title(chromium, open_view):
    open_view(endpoint="ipc:///tmp/a/very/long/path/bn.socket")
    assert text(chromium, "footer").startswith("ipc://.../bn.socket, server ")
    assert chromium.find_element(By.ID, "server").get_attribute("title") == "ipc:///tmp/a/very/long/path/bn.socket"


def hot(driver):
    """Rows of the heat map with a cell in the colour `--hot`."""
    script = """
        const canvas = document.querySelector("#layers canvas"), style = getComputedStyle(document.documentElement);
        const pen = canvas.getContext("2d"), rows = document.querySelectorAll("#layers .labels > span").length;
        const probe = document.createElement("canvas").getContext("2d");
        probe.fillStyle = style.getPropertyValue("--hot"); probe.fillRect(0, 0, 1, 1);
        const [r, g, b] = probe.getImageData(0, 0, 1, 1).data, found = new Set();
        const { data } = pen.getImageData(0, 0, canvas.width, canvas.height);
        for (let at = 0; at < data.length; at += 4)
            if (data[at] === r && data[at + 1] === g && data[at + 2] === b)
                found.add(Math.floor(at / 4 / canvas.width / (canvas.height / rows)));
        return [...found];
    """
    return set(driver.execute_script(script))


def test_keyboard_and_pointer_choose_layer_and_rank(chromium, open_view):
    open_view("healthy", layers=20)
    names = layer_names(20)
    wait_for(chromium, "spread evenly", "#reading", 5)
    scrub = chromium.find_element(By.ID, "scrub")
    scrub.send_keys(Keys.HOME)
    wait_for(chromium, f"{names[0]}: ", "#reading")
    scrub.send_keys(Keys.ARROW_RIGHT)
    wait_for(chromium, f"{names[1]}: ", "#reading")
    wait_for(chromium, f"Variance of {names[1]}", "#time")
    scrub.send_keys(Keys.ARROW_DOWN)
    wait_for(chromium, "comes from the mean of rank 0", "#reading")
    assert "the mean of rank 0" in scrub.get_attribute("aria-valuetext")
    canvas = chromium.find_element(By.CSS_SELECTOR, "#layers canvas")
    across, down = canvas.size["width"], canvas.size["height"]
    corner = ActionChains(chromium).move_to_element_with_offset(canvas, across // 2 - 3, down // 2 - 5)
    corner.perform()
    wait_for(chromium, "comes from the mean of rank 7", "#reading")
    corner.click().perform()
    wait_for(chromium, f"Variance of {names[-1]}", "#time")
    chromium.find_element(By.CSS_SELECTOR, "[name=view][value=variance]").send_keys(Keys.SPACE)
    wait_for(chromium, "up where the rank varies more", "#layers header")
    chromium.find_element(By.CSS_SELECTOR, "[name=view][value=share]").send_keys(Keys.SPACE)


def test_focus_stays_over_sixty_updates_and_the_screen_reader_is_silent(chromium, open_view):
    open_view("waiting", others=["unet"], period=0.1)
    chromium.execute_script("""
        window.spoken = 0; window.updates = 0;
        const listen = (node, count) => new MutationObserver(count).observe(node, { subtree: true, childList: true,
            characterData: true, attributes: true });
        for (const node of document.querySelectorAll("[role=status], [role=alert], [aria-live]"))
            listen(node, () => { window.spoken += 1; });
        listen(document.querySelector("#live"), () => {});
        new PerformanceObserver((list) => { window.updates += list.getEntries().length; }).observe({ type: "measure" });
    """)
    for selector in ("#jobs li:last-child button", "#scrub", "#layers .chips button", "#more-events"):
        element = chromium.find_elements(By.CSS_SELECTOR, selector)[0]
        if not element.is_displayed():
            continue
        chromium.execute_script("window.updates = 0; arguments[0].focus()", element)
        wait_until(
            chromium, lambda: chromium.execute_script("return window.updates") >= 60, "no updates", START_SECONDS
        )
        assert chromium.execute_script("return document.activeElement === arguments[0]", element), selector
    assert chromium.execute_script("return window.spoken") == 0


def test_a_redraw_of_64_ranks_and_151_layers_is_not_noticeable(chromium, open_view):
    open_view("slow", ranks=64, layers=151, period=0.2)
    wait_for(chromium, "bn1: ", "#reading", 5)
    chromium.find_element(By.ID, "more-ranks").click()
    durations = []
    for _ in range(15):
        time.sleep(0.3)
        durations.append(chromium.execute_script("return performance.getEntriesByName('draw').at(-1).duration"))
    chromium.find_element(By.ID, "more-ranks").click()
    assert statistics.median(durations) < REDRAW_MILLISECONDS, durations


def test_the_job_that_needs_attention_comes_first_and_a_chosen_one_stays(chromium, open_view):
    change = open_view("healthy", job="zebra", others=["ant"])
    assert texts(chromium, "#jobs b") == ["ant", "zebra"]
    assert text(chromium, "#banner .job") == "ant"
    change("waiting", job="zebra", others=["ant"])
    wait_for(chromium, "zebra", "#banner .job", 5)
    assert texts(chromium, "#jobs b") == ["zebra", "ant"]
    chromium.find_elements(By.CSS_SELECTOR, "#jobs button")[1].click()
    wait_for(chromium, "ant", "#banner .job")
    show(chromium, 390)
    assert text(chromium, "#jobs") == ""
    assert Select(chromium.find_element(By.ID, "picker")).first_selected_option.text.startswith("\u2713 ant: Healthy")
    Select(chromium.find_element(By.ID, "picker")).select_by_index(0)
    wait_for(chromium, "zebra", "#banner .job")


def test_an_ended_job_stays_until_it_is_dismissed_also_when_the_page_is_opened_again(chromium, open_view):
    open_view("broken")
    chromium.refresh()
    wait_for(chromium, "Broken: rank 1 (gpu-a, pid 12271) raised ValueError", "#banner", 5)
    assert "past" in chromium.find_element(By.TAG_NAME, "main").get_attribute("class")
    assert "failed" in text(chromium, "[data-rank='1']")
    chromium.find_element(By.CSS_SELECTOR, "#banner button").click()
    wait_for(chromium, "No job yet", "#banner")
    chromium.refresh()
    wait_for(chromium, "No job yet", "#banner", 5)


def test_a_silent_server_leaves_its_last_state_with_its_time(chromium, open_view):
    open_view("silent")
    wait_for(chromium, "The server does not answer", "#banner")
    assert "no answer since" in text(chromium, "#live")
    assert len(chromium.find_elements(By.CSS_SELECTOR, "#ranks tbody tr")) == 8


def test_names_from_other_processes_are_shown_as_text(chromium, open_view):
    open_view("data", job=HOSTILE, layer=HOSTILE, others=["<script>alert(2)</script>"])
    wait_for(chromium, HOSTILE, "#banner .job")
    wait_for(chromium, HOSTILE, "#reading", 5)
    assert "<script>alert(2)</script>" in text(chromium, "#jobs")
    assert chromium.find_elements(By.CSS_SELECTOR, "main img, main script") == []


def test_with_forced_colours_the_map_and_the_banner_are_drawn(chromium, open_view):
    open_view("data")
    wait_for(chromium, "bn1: ", "#reading", 5)
    show(chromium, forced_colors="active")
    assert hot(chromium) == {2}
    assert "Rank 2's data look different" in text(chromium, "#banner")


def test_nothing_moves_with_reduced_motion(chromium, open_view):
    open_view()
    moving = "return document.getAnimations().length"
    show(chromium, prefers_reduced_motion="no-preference")
    assert chromium.execute_script(moving) == 1
    show(chromium, prefers_reduced_motion="reduce")
    assert chromium.execute_script(moving) == 0


def test_with_too_many_readers_the_page_reports_it_and_retries(chromium, tmp_path):
    port = free_port()
    with ExitStack() as stack:
        stack.enter_context(page_server(tmp_path, port, {"state": "healthy"}))
        open_page(chromium, port)
        wait_for(chromium, "Healthy", "#banner", 5)
        chromium.get("about:blank")
        time.sleep(1)  # until its stream has ended
        with ExitStack() as readers:
            for _ in range(MAX_STREAMS):
                reader = readers.enter_context(closing(HTTPConnection("127.0.0.1", port)))
                reader.request("GET", "/events", headers={"Authorization": f"Bearer {TOKEN}"})
                assert readers.enter_context(reader.getresponse()).status == 200
            open_page(chromium, port)
            wait_for(chromium, f"The view says: too many readers: {MAX_STREAMS} are connected", seconds=5)
        wait_for(chromium, "Healthy", "#banner", START_SECONDS)
        assert "too many readers" not in text(chromium)
        errors(chromium)  # drops the browser's error about status 503


def test_a_view_that_ends_leaves_its_last_state(chromium, tmp_path):
    port = free_port()
    with page_server(tmp_path, port, {"state": "healthy"}):
        open_page(chromium, port)
        wait_for(chromium, "Healthy", "#banner", 5)
    wait_for(chromium, "The view does not answer", "#unreachable", 5)
    assert "Healthy" in text(chromium, "#banner")
    assert "no answer since" in text(chromium, "#live")
    errors(chromium)
