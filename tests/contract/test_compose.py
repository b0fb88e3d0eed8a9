"""The compose files: our commands accept the services' commands, and a server and replicas train as configured.

The files' users, limits, networks and volumes are tested in `tests/deployment`. Here their commands run on this host,
without containers; with a container engine the harness runs the files unchanged.
"""

import os
import re
import runpy
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import zmq

from documentation.docs_engine import want_of_engine
from support.contract_seed import SILENCE_SECONDS, private_folder, run, serving
from support.paths import ROOT

FOLDER = ROOT / "docker"
FILES = ("docker-compose.yml", "docker-compose.gpu.yml", "docker-compose.view.yml")

# Limit of a training of two steps: on a busy machine two processes take minutes to load torch and scikit-learn.
TRAINING_SECONDS = 240.0

# Settings of the files for a training of two steps by two replicas.
SETTINGS = {
    "REPLICAS": "2",
    "STEPS": "2",
    "COMPARE_AFTER": "1",
    "DEADLINE": str(TRAINING_SECONDS),
    "VIEW_TOKEN": "a-token-of-a-test",
}

yaml = pytest.importorskip("yaml", reason="needs PyYAML, of the extra dev")
with_curve = pytest.mark.skipif(not zmq.has("curve"), reason="this libzmq was built without CURVE")


def with_settings(value):
    """A value of a compose file, with `${NAME}`, `${NAME:-default}`, `${NAME:?error}` and `$$` replaced."""
    if isinstance(value, dict):
        return {name: with_settings(each) for name, each in value.items()}
    if isinstance(value, list):
        return [with_settings(each) for each in value]
    if not isinstance(value, str):
        return value

    def found(match):
        name, sign, default = match.groups()
        if sign == ":?":
            return SETTINGS[name]
        return SETTINGS.get(name, default or "")

    return re.sub(r"\$\{(\w+)(?:(:[-?])([^}]*))?\}", found, value).replace("$$", "$")


def services(*names):
    """The services of compose files; a later file overrides an earlier one."""
    merged = {}
    for name in names:
        for service, said in with_settings(yaml.safe_load((FOLDER / name).read_text()))["services"].items():
            merged[service] = {**merged.get(service, {}), **said}
    return merged


def image_of(target):
    """The variables and the entrypoint of an image, from its stage in the Dockerfile."""
    stages = re.split(r"^FROM \S+ AS (\S+)\n", (FOLDER / "Dockerfile").read_text(), flags=re.MULTILINE)
    text = dict(zip(stages[1::2], stages[2::2], strict=True))[target]
    variables = dict(
        word.split("=", 1) for line in re.findall(r"^ENV (.*)$", text, re.MULTILINE) for word in line.split()
    )
    return variables, re.search(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)[1]


# Where the volumes lie in the folder of a test.
VOLUMES = {"server-keys": "keys", "client-keys": "keys/secrets", "meeting": "meeting", "results": "results"}


class Host:
    """A folder in place of the volumes; replaces containers' paths by paths in it, and `python` by this interpreter."""

    def __init__(self, folder):
        self.folder = folder
        for name in ("meeting", "results"):
            (folder / name).mkdir()

    def text(self, service, text):
        """A command line or variable of a service."""
        mounts = dict(reversed(volume.split(":")[:2]) for volume in service["volumes"])
        for path in sorted(mounts, key=len, reverse=True):
            text = re.sub(rf"(?<![\w/.-]){path}(?![\w-])", str(self.folder / VOLUMES[mounts[path]]), text)
        return re.sub(r"(?<=exec )python\b", sys.executable, text)

    def environment(self, service):
        """The variables of a service."""
        return {name: self.text(service, str(value)) for name, value in service["environment"].items()}


@pytest.fixture
def host():
    with private_folder() as folder:
        yield Host(folder)


def health_check(server):
    return [sys.executable if word == "python" else word for word in server["healthcheck"]["test"][1:]]


def test_the_files_have_a_server_its_keys_replicas_a_gpu_variant_and_a_view():
    assert [list(services(name)) for name in FILES] == [
        ["keygen", "server", "replica"],
        ["replica"],
        ["view", "prometheus", "grafana"],
    ]


@with_curve
@pytest.mark.processes
@pytest.mark.timeout(400)
def test_the_commands_of_the_file_make_keys_serve_pass_the_health_check_and_train(host):
    found = services("docker-compose.yml")
    shell, option, line = found["keygen"]["entrypoint"]
    assert run(shell, option, host.text(found["keygen"], line), PYTHONPATH=str(ROOT)).returncode == 0
    variables, entrypoint = image_of("server")
    assert entrypoint == '["python", "-m", "server"]'
    assert variables["STATSD_BN_BIND"] == "tcp://0.0.0.0:5555"
    told = {**host.environment(found["server"]), "STATSD_BN_SILENCE_SECONDS": str(SILENCE_SECONDS)}
    with serving([sys.executable, "-m", "server"], **told, STATSD_BN_BIND="tcp://127.0.0.1:*") as server:
        checked = run(*health_check(found["server"]), STATSD_BN_BIND=server.endpoint)
        assert (checked.returncode, checked.stderr) == (0, "")
        with ThreadPoolExecutor() as threads:
            replicas = list(threads.map(lambda rank: trained(found["replica"], host, server.endpoint, rank), range(2)))
    assert [replica.returncode for replica in replicas] == [0, 0], replicas[0].stderr + replicas[1].stderr
    saved = torch.load(host.folder / "results" / "trained.pt")
    assert set(saved["states"]) == {1, 2}
    assert saved["rounds"] > 0


def trained(service, host, endpoint, rank):
    """Runs one replica to its end; RANK is set as in `docker/kubernetes`, since /meeting is elsewhere here."""
    _, entrypoint = image_of("replica")
    assert entrypoint == '["python", "/app/docker/replica.py"]'
    told = {**host.environment(service), "STATSD_BN_ENDPOINT": endpoint, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    command = [sys.executable, FOLDER / "replica.py", *shlex.split(host.text(service, service["command"]))]
    return run(*command, "--init-method", f"file://{host.folder}/meeting/gloo", seconds=TRAINING_SECONDS, **told)


def test_the_training_knows_all_arguments_of_the_gpu_variant(monkeypatch, capsys):
    command = shlex.split(services(*FILES[:2])["replica"]["command"])
    assert "cuda" in command
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr(sys, "argv", ["train_digits.py", *command, "--no-such-flag"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(ROOT / "examples" / "train_digits.py"))["arguments"]()
    assert capsys.readouterr().err.endswith("unrecognized arguments: --no-such-flag\n")


def test_the_view_knows_all_arguments_of_its_service():
    _, entrypoint = image_of("view")
    assert entrypoint == '["statsd-bn", "view"]'
    view = services(*FILES)["view"]
    command = [sys.executable, "-m", "server", "view", *shlex.split(view["command"])]
    told = {name: value for name, value in view["environment"].items() if name == "STATSD_BN_ENDPOINT"}
    refused = run(*command, "--no-such-flag", **told)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "unknown option --no-such-flag" in refused.stderr


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.skipif(want_of_engine() is not None, reason=str(want_of_engine()))
def test_the_harness_trains_in_containers(tmp_path):
    done = subprocess.run(
        [FOLDER / "harness", "--logs", tmp_path], env=os.environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
