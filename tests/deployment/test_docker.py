"""Tests of the images and the harness that need no container engine."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from documentation.docs_engine import script
from server.security.keygen import load_clients
from support.paths import ROOT

FOLDER = ROOT / "docker"


@pytest.fixture
def compose():
    yaml = pytest.importorskip("yaml", reason="needs PyYAML, of the extra dev")
    return lambda name: yaml.safe_load((FOLDER / name).read_text())


def stages() -> dict[str, str]:
    """The text of each stage of the Dockerfile."""
    text = re.sub(r"^#.*\n", "", (FOLDER / "Dockerfile").read_text(), flags=re.MULTILINE)
    parts = re.split(r"^FROM \S+ AS (\S+)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("target", ["server", "replica", "view"])
def test_an_image_runs_as_nobody(target):
    assert re.search(r"^USER 65534:65534$", stages()[target], re.MULTILINE)


def test_the_servers_image_has_a_health_check_and_nothing_of_the_replicas():
    found = stages()
    assert 'CMD ["python", "-m", "server", "check"]' in found["server"]
    assert "--from=server-build" in found["server"]
    assert "replica" not in found["server"]
    assert found["server-build"].strip() == "RUN ./install server"


def test_every_path_that_the_dockerfile_copies_exists_and_is_in_the_build_context():
    copied = [
        word
        for line in re.findall(r"^COPY (?!--from)(.*)$", "\n".join(stages().values()), re.MULTILINE)
        for word in line.split()[:-1]
    ]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for path in (word.replace("${WHEELS}", "docker/wheels") for word in copied):
        assert (ROOT / path).exists(), path
        assert f"!{Path(path).parts[0]}" in ignored


def test_the_compose_network_is_internal_and_each_service_waits_for_the_previous_one(compose):
    found = compose("docker-compose.yml")
    services = found["services"]
    server, replica = services["server"], services["replica"]
    assert found["networks"] == {"statistics": {"internal": True}}
    assert server["networks"] == replica["networks"] == ["statistics"]
    assert services["keygen"]["network_mode"] == "none"
    assert server["depends_on"] == {"keygen": {"condition": "service_completed_successfully"}}
    assert replica["depends_on"] == {"server": {"condition": "service_healthy"}}
    assert replica["scale"] == replica["environment"]["WORLD_SIZE"] == "${REPLICAS:-4}"
    built = {name: service["build"]["target"] for name, service in services.items() if "build" in service}
    # keygen and the server share one image, which is built once.
    assert built == {"keygen": "server", "replica": "replica"}
    assert services["keygen"]["image"] == server["image"]
    assert set(built.values()) <= set(stages())


@pytest.mark.parametrize(
    ("file", "name"),
    [
        *(("docker-compose.yml", name) for name in ("keygen", "server", "replica")),
        *(("docker-compose.view.yml", name) for name in ("view", "prometheus", "grafana")),
    ],
)
def test_a_service_has_limits_and_can_write_only_to_its_volumes(compose, file, name):
    service = compose(file)["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["mem_limit"] == service["memswap_limit"]
    assert service["pids_limit"] > 0
    assert service["cpus"] == "${CPUS:-2}"
    assert "privileged" not in service


def test_a_failed_server_is_restarted_and_a_failed_replica_is_not(compose):
    found = {name: service["restart"] for name, service in compose("docker-compose.yml")["services"].items()}
    # The file quotes `no`, because YAML reads an unquoted `no` as False.
    assert found == {"keygen": "no", "server": "unless-stopped", "replica": "no"}


def test_file_systems_in_memory_have_a_size_limit(compose):
    found = compose("docker-compose.yml")
    (scratch,) = found["services"]["replica"]["tmpfs"]
    assert "size=256m" in scratch.partition(":")[2].split(",")
    assert "size=16m" in found["volumes"]["meeting"]["driver_opts"]["o"].split(",")


def test_the_compose_file_has_keys_by_default_and_each_container_sees_only_its_own_secret(compose):
    services = compose("docker-compose.yml")["services"]
    server, replica = services["server"], services["replica"]
    assert server["environment"] == {"STATSD_BN_CURVE": "/keys"}
    assert replica["environment"]["STATSD_BN_CURVE"] == "/keys/replica.key_secret"
    assert server["volumes"] == ["server-keys:/keys:ro"]
    assert [one for one in replica["volumes"] if "keys" in one] == ["client-keys:/keys:ro"]
    assert services["keygen"]["volumes"] == ["server-keys:/keys", "client-keys:/keys/secrets"]
    assert not any("STATSD_BN_INSECURE" in service.get("environment", {}) for service in services.values())


def test_keys_are_made_once_for_the_job_of_the_replicas(compose, tmp_path):
    services = compose("docker-compose.yml")["services"]
    shell, option, line = services["keygen"]["entrypoint"]
    command = line.replace("/keys", str(tmp_path / "keys")).replace("python", sys.executable)

    def run() -> str:
        return subprocess.run([shell, option, command], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert run().count("wrote ") == 4
    secret = (tmp_path / "keys" / "secrets" / "replica.key_secret").read_text()
    assert run() == ""
    assert (tmp_path / "keys" / "secrets" / "replica.key_secret").read_text() == secret
    (client,) = load_clients(tmp_path / "keys")
    assert (client.name, list(client.jobs)) == ("replica", [services["replica"]["environment"]["STATSD_BN_JOB"]])


def test_the_gpu_file_adds_devices_and_changes_nothing_else(compose):
    plain = compose("docker-compose.yml")["services"]["replica"]
    services = compose("docker-compose.gpu.yml")["services"]
    assert set(services) == {"replica"}
    with_gpu = services["replica"]
    assert set(with_gpu) == {"command", "deploy"}
    assert with_gpu["command"].replace(" --device cuda", "") == plain["command"]
    (device,) = with_gpu["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}


def test_the_view_is_in_the_servers_network_and_only_this_machine_can_open_it(compose):
    services = compose("docker-compose.view.yml")["services"]
    assert set(services) == {"view", "prometheus", "grafana"}
    view = services["view"]
    assert set(view["networks"]) == {"statistics", "page"}
    assert view["volumes"] == ["client-keys:/keys:ro"]
    assert view["environment"]["STATSD_BN_VIEW_TOKEN"].startswith("${VIEW_TOKEN:?")
    assert view["build"]["target"] in stages()
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    for name in ("prometheus", "grafana"):
        assert services[name]["profiles"] == ["monitoring"]
        assert services[name]["networks"] == ["page"]
        mounted = [one.split(":")[0] for one in services[name]["volumes"] if one.startswith("./")]
        assert mounted
        assert all((FOLDER / path).is_file() for path in mounted)


def test_prometheus_finds_the_token_in_the_configured_file(compose):
    (scrape,) = compose("monitoring/prometheus.yml")["scrape_configs"]
    _, _, line = compose("docker-compose.view.yml")["services"]["prometheus"]["entrypoint"]
    assert f'printf %s "$$VIEW_TOKEN" >{scrape["authorization"]["credentials_file"]} &&' in line
    (target,) = scrape["static_configs"]
    assert target["targets"] == ["view:8321"]
    assert "--http 0.0.0.0:8321" in compose("docker-compose.view.yml")["services"]["view"]["command"]


@pytest.mark.parametrize("script", ["bootstrap-engine", "fetch-wheels", "harness", "install"])
def test_a_shell_script_can_be_read_by_its_shell(script):
    path = FOLDER / script
    shell = path.read_text().splitlines()[0].rpartition("/")[2].split()[-1]
    assert os.access(path, os.X_OK)
    done = subprocess.run([shell, "-n", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_each_replica_claims_a_separate_rank_and_keeps_it_after_a_restart(tmp_path):
    claim = script("replica").claim
    assert [claim(tmp_path, 3, name) for name in ("a", "b", "a", "c", "b")] == [0, 1, 0, 2, 1]
    with pytest.raises(SystemExit, match=f"expected one of 3 ranks to be free in {tmp_path}, but all are taken"):
        claim(tmp_path, 3, "d")


def harness(*arguments, **environ):
    return subprocess.run(
        [sys.executable, FOLDER / "harness.py", *arguments],
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_an_engine_the_harness_fails_and_names_what_is_missing(tmp_path):
    done = harness("--logs", str(tmp_path), PATH=str(tmp_path))
    assert done.returncode == 2
    assert "expected Compose" in done.stderr


def test_a_number_of_replicas_that_does_not_divide_the_batch_is_refused():
    done = harness("--replicas", "3")
    assert done.returncode == 2
    assert "invalid choice: 3" in done.stderr


ENGINE_STAND_IN = """#!/bin/sh
echo "$@" >>"$CALLS"
case "$*" in
  *" up "* | "run --detach "*) echo "no such image" >&2; exit 1 ;;
  "image inspect"*) echo "$SIZE" ;;
  "run --rm --entrypoint python statsd-bn-server"*) echo "65534 False" ;;
esac
"""


@pytest.mark.parametrize(("size", "fits"), [("249000000", "yes"), ("251000000", "NO")])
def test_the_harness_marks_each_failed_scenario_in_its_table_and_cleans_up(tmp_path, size, fits):
    program = tmp_path / "docker"
    program.write_text(ENGINE_STAND_IN)
    program.chmod(0o755)
    calls = tmp_path / "calls"
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    done = harness("--logs", str(tmp_path / "logs"), PATH=path, CALLS=str(calls), SIZE=size, COMPOSE="docker compose")
    assert done.returncode == 1
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")][2:]
    assert [row.rpartition(" | ")[2].strip(" |") for row in rows] == [fits] + ["NO"] * 8
    ups, downs = ([line for line in calls.read_text().splitlines() if f" {word} " in line] for word in ("up", "down"))
    assert len(ups) == 7
    assert len(downs) == 7
    assert all("--volumes" in line for line in downs)
