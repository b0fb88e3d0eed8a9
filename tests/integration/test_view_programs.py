"""The command `view` as a process: the page of a running server, and a scrape by Prometheus."""

import base64
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request

import numpy as np
import pytest
import zmq

from conftest import running_server
from server.__main__ import main
from statsd_bn import limits
from statsd_bn.messages import SkewStats
from statsd_bn.skew import MIN_SECONDS
from statsd_bn.text import unwrap
from statsd_bn.wire import encode
from support.launched import free_port
from support.paths import ROOT
from support.strategies import contribution, key, register, session_of
from support.view_reports import view_page

pytest.importorskip("uvicorn", reason="needs the extra view")

WAIT_SECONDS = 30.0


@contextlib.contextmanager
def planted_job(endpoint, job):
    stem, head = key("stem.bn", job=job), key("head.bn", job=job)
    messages = [
        *(register(rank, 2, job=job) for rank in range(2)),
        *(contribution(rank, value, stem) for rank, value in enumerate([1.0, float("nan")])),
        contribution(0, 1.0, head),
    ]
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(endpoint)
        for message in messages:
            dealer.send(encode(message))
        yield


def wait_for(read, *facts, seconds=WAIT_SECONDS):
    expiry = time.monotonic() + seconds
    while True:
        found = read()
        missing = [fact for fact in facts if fact not in found]
        if not missing:
            return found
        assert time.monotonic() < expiry, f"no {missing} in:\n{found}"
        time.sleep(0.1)


@contextlib.contextmanager
def viewing(*arguments):
    with view_page(*arguments) as (_, port, token):

        def fetch(path, **query):
            address = f"http://127.0.0.1:{port}/{path}?{urllib.parse.urlencode(query)}"
            request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"})
            with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:  # noqa: S310
                # The stream does not end; its first line is the newest snapshot.
                body = answer.readline() if path == "events" else answer.read()
            return body.decode()

        yield fetch


def snapshot(fetch):
    return json.loads(fetch("events").removeprefix("data: "))


def test_the_page_of_a_running_job_has_its_ranks_and_its_first_non_finite_row(server, job):
    with planted_job(server.endpoint, job), viewing(server.endpoint) as fetch:
        wait_for(lambda: fetch("events"), f'"{job}"', "first non-finite: layer 'stem.bn', forward, step 0, rank 1 (")
        (group,) = [group for group in snapshot(fetch)["groups"] if group["job"] == job]
        assert [member["member"] for member in group["members"]] == [0, 1]
        assert "statsd_bn_members" in fetch("metrics")


def test_a_server_with_keys_shows_its_jobs_to_key_holders(tmp_path):
    keys = tmp_path / "keys"
    command = [sys.executable, "-m", "server"]
    subprocess.run([*command, "keygen", keys, "--client", "alice"], cwd=ROOT, check=True, capture_output=True)
    with running_server("--curve", str(keys)) as secured:
        with viewing(secured.endpoint, "--curve", str(keys / "secrets" / "alice.key_secret")) as fetch:
            assert snapshot(fetch)["groups"] == []
        view = [*command, "view", secured.endpoint, "--http", "127.0.0.1:0"]
        refused = subprocess.run(view, cwd=ROOT, check=False, capture_output=True, text=True)
        assert refused.returncode == 5
        assert "expects a key, and this client has none" in unwrap(refused.stderr)


def test_reported_figures_are_in_the_heat_map(server, job):
    members, layers = 256, [f"layer{number}" for number in range(limits.MAX_SKEW_LAYERS)]
    named = ["\n".join(f"{part}.{layer}" for layer in layers) for part in "abcd"]
    values = np.full((len(layers), members, 4), [8.0, 0.5, 1.0, 0.001])
    values[:, 7, 3] = 0.1
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(server.endpoint)
        for rank in range(members):
            dealer.send(encode(register(rank, members, job=job)))
        for part in named:
            dealer.send(encode(SkewStats(session_of(0, job), 0, part, values)))
            # The server drops samples that come sooner.
            time.sleep(MIN_SECONDS + 0.7)
        with viewing(server.endpoint) as fetch:
            heat = json.loads(fetch("heat", job=job, group="world"))
    assert sorted(heat["layers"]) == sorted("\n".join(named).split("\n"))
    assert len(heat["layers"]) * members * 32 > limits.MAX_FIGURES_BYTES
    assert heat["eta2"][0] == pytest.approx(0.355)
    parts = np.frombuffer(base64.b64decode(heat["parts"]), "<f4").reshape(-1, members)
    assert parts[0, 7] == np.float32(0.1)


@pytest.mark.skipif(not shutil.which("prometheus"), reason="needs Debian's prometheus")
def test_prometheus_scrapes_it_and_loads_the_rules(server, job, tmp_path):
    port, own = free_port(), free_port()
    folder = ROOT / "docker/monitoring"
    (tmp_path / "alerts.yml").write_text((folder / "alerts.yml").read_text())
    config = (folder / "prometheus.yml").read_text().replace("view:8321", f"127.0.0.1:{port}").replace("5s", "1s")
    (tmp_path / "prometheus.yml").write_text(config.replace("/prometheus/token", str(tmp_path / "token")))
    (tmp_path / "token").write_text("of-the-test-0123")
    storage = ["--storage.tsdb.path", str(tmp_path / "data"), "--web.listen-address", f"127.0.0.1:{own}"]

    def ask(path, **query):
        address = f"http://127.0.0.1:{own}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(address, timeout=5) as answer:
                return json.load(answer)["data"]
        except OSError:
            return {}

    def values(expression):
        return {
            (found["metric"].get("job"), float(found["value"][1]))
            for found in ask("query", query=expression).get("result", ())
        }

    environment = {**os.environ, "STATSD_BN_VIEW_TOKEN": "of-the-test-0123"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(planted_job(server.endpoint, job))
        for command in (
            [sys.executable, "-m", "server", "view", server.endpoint, "--http", f"0.0.0.0:{port}"],
            ["prometheus", "--config.file", str(tmp_path / "prometheus.yml"), *storage],
        ):
            started = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, env=environment)
            stack.callback(started.wait)
            stack.callback(started.kill)
        wait_for(lambda: values("statsd_bn_members"), (job, 2.0))
        assert (job, 1.0) in values("statsd_bn_non_finite")
        wait_for(lambda: [held > 0 and of for of, held in values("statsd_bn_waiting_seconds")], job)
        (group,) = ask("rules")["groups"]
        assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}
        assert "StatsdBnNonFinite" in {rule["name"] for rule in group["rules"]}


def test_view_exits_with_3_if_its_port_is_taken(server, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        assert main(["view", server.endpoint, "--http", address]) == 3
    assert unwrap(capsys.readouterr().err) == (
        f"statsd_bn: --http: cannot listen at {address!r}: Address already in use\n"
    )


@pytest.mark.parametrize(
    "address", ["8321", "127.0.0.1", ":8321", "127.0.0.1:65536", "127.0.0.1:-1", "h:" + "9" * 5000]
)
def test_invalid_addresses_of_the_page_are_refused(address, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["view", "--http", address])
    error = capsys.readouterr().err
    assert error.startswith("statsd_bn: argument --http: expected HOST:PORT with a port of 0 to 65535, got ")
    assert len(error) < 200


def test_by_default_the_page_is_at_a_port_of_loopback(server, monkeypatch):
    calls = []
    monkeypatch.setattr("server.view.web.serve", lambda *arguments: calls.append(arguments))
    assert main(["view", server.endpoint]) == 0
    ((feed, *address, _),) = calls
    assert (feed.snapshot["endpoint"], address) == (server.endpoint, ["127.0.0.1", 8321])
