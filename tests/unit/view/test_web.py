"""Responses of the page's server, by address."""

import asyncio
import base64
import json
import struct
from urllib.parse import urlencode

import pytest

pytest.importorskip("uvicorn", reason="needs the extra view")

from server.view.feed import Feed
from server.view.snapshot import heat, ranks_of
from server.view.web import FILES, MAX_STREAMS, app
from support.view_reports import figures, group, layer, member, report

TOKEN = "s3cret"  # noqa: S105 - it opens nothing
BEARER = [(b"authorization", f"Bearer {TOKEN}".encode())]
JOB = "<script>alert(1)</script>"
LAYER = 'bn"<b>&1'


class Page:
    """The application with one snapshot of a pretended server, without sockets."""

    def __init__(self):
        layers = figures(*(layer(name, 0.01, 0.01, 0.2) for name in ("bn0", LAYER)))
        answer = report(group(*(member(rank) for rank in range(3)), job=JOB, figures=layers), group(member(0)))
        self.feed = Feed("tcp://127.0.0.1:4555", lambda: answer)
        self.feed.refresh()
        self.app = app(self.feed, TOKEN)

    def get(self, path, method="GET", headers=BEARER, **query):
        return asyncio.run(self.answer(path, method, headers, **query))

    async def answer(self, path, method="GET", headers=BEARER, until=None, **query):
        messages = []

        async def send(message):
            messages.append(message)
            if until and until in message.get("body", b""):
                self.feed.stop()

        async def receive():
            await asyncio.sleep(60)

        await self.app(self.scope(path, method, headers, "2.4", **query), receive, send)
        body = b"".join(message.get("body", b"") for message in messages[1:])
        return messages[0]["status"], dict(messages[0]["headers"]), body

    @staticmethod
    def scope(path, method="GET", headers=BEARER, version="2.3", **query):
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": version},
            "method": method,
            "path": path,
            "query_string": urlencode(query).encode(),
            "headers": [(b"host", b"localhost"), *headers],
        }


ASKS = {"/heat": {"job": JOB, "group": "world"}, "/history": {"job": JOB, "group": "world", "layer": LAYER}}


@pytest.mark.parametrize("path", [*FILES, "/metrics", *ASKS])
def test_each_address_asks_for_the_token(path):
    status, _, body = Page().get(path, headers=(), **ASKS.get(path, {}))
    assert (status, JOB.encode() in body) == (401, False)
    status, headers, _ = Page().get(path, **ASKS.get(path, {}))
    assert status == 200
    assert b"default-src 'none'" in headers[b"content-security-policy"]


def test_the_stream_asks_for_the_token_too():
    assert Page().get("/events", headers=())[0] == 401


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("path", ["/", "/events", *ASKS])
def test_the_page_only_reads(path, method):
    status, headers, _ = Page().get(path, method)
    assert (status, headers[b"allow"]) == (405, b"GET, HEAD")


@pytest.mark.parametrize("path", ["/nothing", "/page", "/../feed.py", "/heat.css", "/js/page.js"])
def test_an_unknown_address_is_not_found(path):
    assert Page().get(path)[0] == 404


def test_names_appear_only_in_json_that_no_browser_renders():
    page = Page()
    for path in [*FILES, *ASKS]:
        _, headers, body = page.get(path, **ASKS.get(path, {}))
        assert headers[b"x-content-type-options"] == b"nosniff"
        assert (headers[b"content-type"] == b"application/json") == (path in ASKS), path
        assert (JOB.encode() in body) == (path == "/heat"), path


def test_the_stream_sends_each_snapshot_without_its_figures():
    page = Page()
    _, headers, body = asyncio.run(page.answer("/events", until=b"\n\n"))
    assert headers[b"content-type"].startswith(b"text/event-stream")
    first = body.decode().split("\n\n")[0]
    assert first.startswith("data: ")
    snapshot = json.loads(first.removeprefix("data: "))
    assert snapshot["groups"][0]["job"] == JOB
    assert [one["has_figures"] for one in snapshot["groups"]] == [True, False]
    assert "parts" not in first


def test_streams_are_bounded():
    async def open_too_many():
        page = Page()
        open_ = [asyncio.ensure_future(page.answer("/events")) for _ in range(MAX_STREAMS)]
        await asyncio.sleep(0)
        refused = await page.answer("/events")
        page.feed.stop()
        await asyncio.gather(*open_)
        return refused[0], (await page.answer("/events"))[0]

    assert asyncio.run(open_too_many()) == (503, 200)


def test_the_heat_has_all_layers_and_ranks():
    heatmap = json.loads(Page().get("/heat", **ASKS["/heat"])[2])
    assert (heatmap["layers"], heatmap["members"], heatmap["eta2"]) == (["bn0", LAYER], 3, [0.22, 0.22])
    assert heatmap["ranks"] == [0, 1, 2]
    parts = struct.unpack("<6f", base64.b64decode(heatmap["parts"]))
    assert parts == pytest.approx([0.01, 0.01, 0.2] * 2)


def test_the_heat_of_a_smaller_group_names_its_ranks_as_in_the_job():
    of = group(member(5), member(3), group="odd", figures=figures(layer("bn", 0.01, 0.01)))
    assert heat(report(of), "digits", "odd")["ranks"] == [3, 5]


def test_ranks_that_a_report_has_no_room_for_are_not_known():
    of = group(member(5), member(3), group="odd", members_left_out=2)
    assert ranks_of(of, 4) == [3, 5, None, None]
    assert ranks_of(of, 5) == [None] * 5, "one rank has left"


def test_a_rank_of_the_world_is_known_even_if_others_have_left():
    assert ranks_of(group(member(1)), 3) == [0, 1, 2]


@pytest.mark.parametrize("path", ASKS)
@pytest.mark.parametrize("wrong", [{"job": "other"}, {"group": "other"}])
def test_an_unknown_name_is_not_found(path, wrong):
    status, _, body = Page().get(path, **ASKS[path] | wrong)
    assert (status, body) == (204, b"")


def test_an_unknown_layer_has_no_history():
    assert Page().get("/history", **ASKS["/history"] | {"layer": "other"})[0] == 204


def test_a_group_without_figures_has_no_heat():
    assert Page().get("/heat", job="digits", group="world")[0] == 204


@pytest.mark.parametrize(("path", "names"), [("/heat", b"job and group"), ("/history", b"job, group and layer")])
def test_the_answer_to_an_incomplete_request_names_the_expected_arguments(path, names):
    status, headers, body = Page().get(path, job=JOB)
    assert (status, body) == (400, b"expected " + names + b" in the query")
    assert headers[b"x-content-type-options"] == b"nosniff"


def test_a_reader_that_leaves_before_the_first_event_frees_its_place():
    page = Page()

    async def leave():
        return {"type": "http.disconnect"}

    async def come_and_go():
        scope = page.scope("/events")
        for _ in range(2 * MAX_STREAMS):
            statuses = []

            async def send(message, statuses=statuses):
                statuses.append(message.get("status"))

            await page.app(scope, leave, send)
            assert 503 not in statuses
        page.feed.stop()

    asyncio.run(come_and_go())


def test_an_internal_error_is_logged_in_one_line_without_a_traceback(caplog):
    page = Page()
    page.feed.snapshot = {}  # without the entry that the heat map reads
    assert page.get("/heat", **ASKS["/heat"])[0] == 500
    (record,) = caplog.records
    assert (record.getMessage(), record.exc_info) == ("view: /heat failed: KeyError('groups')", None)
