"""Programs of others show what the view shows: a terminal in tmux, and Prometheus."""

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
from statsd_bn.messages import Digest
from statsd_bn.skew import LEAST_SECONDS
from statsd_bn.text import unfolded
from statsd_bn.wire import encode
from support.paths import ROOT
from support.ports import free_port
from support.strategies import contribution, key, register, session_of

pytest.importorskip("rich", reason="needs the extra view")
pytest.importorskip("uvicorn", reason="needs the extra view")

WAIT_SECONDS = 30.0


@contextlib.contextmanager
def planted_job(endpoint, job):
    """Two ranks that have exchanged a NaN of rank 1's; then rank 0 waits for rank 1."""
    stem, head = key("stem.bn", job=job), key("head.bn", job=job)
    said = [
        *(register(rank, 2, job=job) for rank in range(2)),
        *(contribution(rank, value, stem) for rank, value in enumerate([1.0, float("nan")])),
        contribution(0, 1.0, head),
    ]
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(endpoint)
        for message in said:
            dealer.send(encode(message))
        yield


def wait_for(look, *facts):
    """Looks again and again until all facts are in what it returns."""
    expiry = time.monotonic() + WAIT_SECONDS
    while True:
        found = look()
        missing = [fact for fact in facts if fact not in found]
        if not missing:
            return found
        assert time.monotonic() < expiry, f"no {missing} in:\n{found}"
        time.sleep(0.1)


@contextlib.contextmanager
def terminal(folder, endpoint, lines=24):
    """Opens the view in 80 columns; returns what looks at them, as one line without spaces."""
    tmux = ["tmux", "-S", str(folder / "tmux"), "-f", "/dev/null"]
    view = f"{sys.executable} -m server view {endpoint}"
    subprocess.run([*tmux, "new-session", "-d", "-x", "80", "-y", str(lines), view], check=True, cwd=ROOT)

    def look():
        shown = subprocess.run([*tmux, "capture-pane", "-p"], capture_output=True, text=True, check=True).stdout
        return "".join(shown.split())

    try:
        yield look
    finally:
        subprocess.run([*tmux, "kill-server"], check=True)


NEEDS_TMUX = pytest.mark.skipif(not shutil.which("tmux"), reason="needs tmux")


@NEEDS_TMUX
def test_a_terminal_of_80_columns_and_24_lines_shows_all_facts(server, job, tmp_path):
    with planted_job(server.endpoint, job), terminal(tmp_path, server.endpoint) as look:
        first = "first non-finite: layer stem.bn, forward, step 0, rank 1"
        wait_for(look, *("".join(fact.split()) for fact in (f"'{job}'", "2 of 2 ranks", "awaited", first)))


@NEEDS_TMUX
@pytest.mark.long
@pytest.mark.processes
def test_a_terminal_shows_a_training_as_it_goes(tmp_path):
    """As the browser does in `test_view_page.py`, which needs one."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    program = str(ROOT / "tests/programs/view_program.py")
    with contextlib.ExitStack() as stack:

        def start(*arguments):
            process = stack.enter_context(subprocess.Popen([sys.executable, *arguments], cwd=ROOT))
            stack.callback(process.kill)
            return process

        server = start("-m", "server", "--bind", endpoint, "--log-level", "error")
        ranks = [start(program, str(rank), endpoint) for rank in range(4)]
        # With room for all events: several may come at once, and the latest leave none for those before.
        look = stack.enter_context(terminal(tmp_path, endpoint, lines=60))
        wait_for(look, "4of4ranks", *(f"pid{rank.pid}" for rank in ranks))
        wait_for(
            look,
            f"firstnon-finite:layer2,forward,step20,rank2({socket.gethostname()},pid{ranks[2].pid}),1of8channels(inf)",
        )
        wait_for(look, f"rank1({socket.gethostname()},pid{ranks[1].pid}):inputmean")
        server.kill()
        server.wait()
        start("-m", "server", "--bind", endpoint, "--log-level", "error")
        wait_for(look, "theserverstartedagain")
        wait_for(look, "4of4ranks")
        ranks[3].kill()
        wait_for(look, f"rank3({socket.gethostname()},pid{ranks[3].pid})waslost")


FACTS = ("2 of 2 ranks", "first non-finite: layer stem.bn, forward, step 0, rank 1 (")


def test_once_shows_a_running_job_and_ends(server, job, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with planted_job(server.endpoint, job):

        def look():
            assert main(["view", server.endpoint, "--once"]) == 0
            return capsys.readouterr().out

        shown = wait_for(look, f"'{job}'", *FACTS)
    assert "\x1b" not in shown  # no terminal is there that could be told of colours


def test_what_is_recorded_of_a_running_server_is_shown_without_it(job, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    file = str(tmp_path / "run.db")
    with running_server() as server, planted_job(server.endpoint, job):

        def look():
            assert main(["view", server.endpoint, "--once", "--record", file]) == 0
            return capsys.readouterr().out

        wait_for(look, job, *FACTS)
    assert main(["view", file]) == 0
    assert f"'{job}'" in capsys.readouterr().out
    assert main(["view", file, "--json"]) == 0
    (group,) = json.loads(capsys.readouterr().out.splitlines()[-1])["groups"]
    assert group["job"] == job
    assert group["non_finite"][0].startswith(FACTS[1])


def test_a_server_with_keys_shows_its_jobs_to_who_has_one(tmp_path):
    keys = tmp_path / "keys"
    command = [sys.executable, "-m", "server"]
    subprocess.run([*command, "keygen", keys, "--client", "alice"], cwd=ROOT, check=True, capture_output=True)
    with running_server("--curve", str(keys)) as secured:
        view = [*command, "view", secured.endpoint, "--once", "--json"]
        alice = ("--curve", keys / "secrets" / "alice.key_secret")
        told = subprocess.run([*view, *alice], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        assert json.loads(told)["groups"] == []
        refused = subprocess.run(view, cwd=ROOT, check=False, capture_output=True, text=True)
        assert refused.returncode
        assert "expects a key, and this client has none" in refused.stderr


def test_what_ranks_have_told_the_server_is_in_a_snapshot(server, job):
    """Of more layers than one answer has room for."""
    members, layers = 128, [f"layer{number}" for number in range(limits.MAX_DIGEST_LAYERS)]
    named = ["\n".join(f"{part}.{layer}" for layer in layers) for part in "abcdefgh"]
    values = np.full((len(layers), members, 4), [8.0, 0.5, 1.0, 0.001])
    values[:, 7, 3] = 0.1
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(server.endpoint)
        for rank in range(members):
            dealer.send(encode(register(rank, members, job=job)))
        for part in named:
            dealer.send(encode(Digest(session_of(0, job), 0, part, values)))
            # What comes sooner is dropped, by the clock of a server that may be slow to look at the one before.
            time.sleep(LEAST_SECONDS + 0.7)
        command = [sys.executable, "-m", "server", "view", server.endpoint, "--once", "--json"]
        snapshot = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    (told,) = [group["figures"]["layers"] for group in snapshot["groups"] if group["job"] == job]
    assert sorted(layer["name"] for layer in told) == sorted("\n".join(named).split("\n"))
    assert len(told) * members * 32 > limits.MAX_FIGURES_BYTES
    assert told[0]["eta2"] == pytest.approx(0.227)
    assert (told[0]["parts"][7], told[0]["means"][7], told[0]["variances"][7]) == (0.1, 0.5, 1.0)


@pytest.mark.skipif(not shutil.which("prometheus"), reason="needs Debian's prometheus")
def test_prometheus_scrapes_it_and_loads_the_rules(server, job, tmp_path):
    port, own = free_port(), free_port()
    folder = ROOT / "docker/monitoring"
    (tmp_path / "alerts.yml").write_text((folder / "alerts.yml").read_text())
    config = (folder / "prometheus.yml").read_text().replace("view:8321", f"127.0.0.1:{port}").replace("5s", "1s")
    (tmp_path / "prometheus.yml").write_text(config.replace("/prometheus/token", str(tmp_path / "token")))
    (tmp_path / "token").write_text("of-the-test")
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

    environment = {**os.environ, "STATSD_BN_VIEW_TOKEN": "of-the-test"}
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


def test_a_page_picks_a_free_port_and_says_which(server):
    command = [sys.executable, "-m", "server", "view", server.endpoint, "--http", "127.0.0.1:0"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            address = process.stderr.readline().removeprefix("statsd_bn view: ").strip()
            port = address.rstrip("/").rpartition(":")[2]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_SECONDS) as answer:
                assert b"statsd_bn_" in answer.read()
        finally:
            process.kill()


def test_a_page_where_another_one_listens_exits_with_3(server, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        assert main(["view", server.endpoint, "--http", address]) == 3
    assert unfolded(capsys.readouterr().err) == (
        f"statsd_bn: --http: cannot listen at {address!r}: Address already in use\n"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--once", "--http", "127.0.0.1:0"], "--once: expected no --http beside it"),
        (["--name", "host-a", "--once"], "--name: expected --http HOST:PORT with it"),
        (["nowhere.db"], "expected an endpoint, or the file of a recording, got 'nowhere.db'"),
    ],
)
def test_arguments_of_the_view_that_do_not_go_together_are_refused(arguments, words, capsys):
    assert main(["view", *arguments]) == 2
    assert words in unfolded(capsys.readouterr().err)
