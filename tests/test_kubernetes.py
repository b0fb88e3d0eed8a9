"""The manifests are what Kubernetes understands, and fit together."""

from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="needs PyYAML, of the extra dev")

FOLDER = Path(__file__).parents[1] / "docker" / "kubernetes"
MANIFESTS = [manifest for path in sorted(FOLDER.glob("*.yml")) for manifest in yaml.safe_load_all(path.read_text())]

# The oldest one with the annotation for an index and in support when this was written, and a newer one.
VERSIONS = ("1.30", "1.34")


def named(kind, name):
    (found,) = [one for one in MANIFESTS if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def name_of(manifest):
    return f"{manifest['kind']} {manifest['metadata']['name']}"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifest", MANIFESTS, ids=name_of)
def test_a_manifest_follows_the_schema(manifest, version):
    schemas = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate, of the extra manifests")
    assert schemas.validate(manifest, version, strict=True) == version
    with pytest.raises(schemas.ValidationError):
        schemas.validate(manifest | {"spec": manifest["spec"] | {"surprise": True}}, version, strict=True)


def containers(manifest):
    pod = manifest["spec"]["template"]["spec"]
    return pod["containers"] + pod.get("initContainers", [])


@pytest.mark.parametrize(
    "workload",
    [one for one in MANIFESTS if "template" in one["spec"]],
    ids=name_of,
)
def test_a_pod_has_no_rights(workload):
    assert workload["spec"]["template"]["spec"]["securityContext"]["runAsNonRoot"]
    for container in containers(workload):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_the_server_is_one_that_is_probed_and_reached_by_members_only():
    server = named("Deployment", "statsd-bn-server")
    assert (server["spec"]["replicas"], server["spec"]["strategy"]) == (1, {"type": "Recreate"})
    (container,) = containers(server)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["exec"]["command"] == ["python", "-m", "server", "check"]
        # Or the command could not say why.
        assert container[probe]["timeoutSeconds"] > 3
    labels = server["spec"]["template"]["metadata"]["labels"]
    assert named("Service", "statsd-bn-server")["spec"]["selector"] == labels
    policy = named("NetworkPolicy", "statsd-bn-server")["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    members = policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    assert members.items() <= named("Job", "statsd-bn-replica")["spec"]["template"]["metadata"]["labels"].items()


def test_the_replicas_are_told_their_rank_and_where_to_meet():
    job = named("Job", "statsd-bn-replica")["spec"]
    replica = containers(named("Job", "statsd-bn-replica"))[0]
    values = {one["name"]: one.get("value") for one in replica["env"]}
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"] == int(values["WORLD_SIZE"])
    assert 8 % int(values["WORLD_SIZE"]) == 0
    assert values["STATSD_BN_ENDPOINT"] == "tcp://statsd-bn-server:5555"
    # Pods of an Indexed Job are named JOB-INDEX, and have a name in the network through a headless service.
    headless = named("Service", job["template"]["spec"]["subdomain"])["spec"]
    assert (headless["clusterIP"], headless["publishNotReadyAddresses"]) == ("None", True)
    assert values["MASTER_ADDR"] == f"statsd-bn-replica-0.{job['template']['spec']['subdomain']}"
    assert int(values["MASTER_PORT"]) == headless["ports"][0]["port"]
