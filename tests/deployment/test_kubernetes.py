"""The manifests are valid for Kubernetes, and agree with each other."""

import re
from pathlib import Path

import pytest

from support.paths import ROOT

yaml = pytest.importorskip("yaml", reason="needs PyYAML, of the extra dev")

FOLDER = ROOT / "docker" / "kubernetes"
MANIFESTS = [manifest for path in sorted(FOLDER.glob("*.yml")) for manifest in yaml.safe_load_all(path.read_text())]

# An old version that annotates a Job's pods with their index, and a newer one.
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


@pytest.mark.parametrize("workload", [one for one in MANIFESTS if "template" in one["spec"]], ids=name_of)
def test_a_pod_has_no_rights(workload):
    assert workload["spec"]["template"]["spec"]["securityContext"]["runAsNonRoot"]
    for container in containers(workload):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@pytest.mark.parametrize("workload", [one for one in MANIFESTS if "template" in one["spec"]], ids=name_of)
def test_a_pod_has_limits_and_no_volume_without_a_size(workload):
    pod = workload["spec"]["template"]["spec"]
    for container in containers(workload):
        resources = container["resources"]
        for kind in ("requests", "limits"):
            assert resources[kind].keys() == {"cpu", "memory", "ephemeral-storage"}
    for volume in pod["volumes"]:
        assert volume.keys() - {"name"} == {"secret"} or volume["emptyDir"]["sizeLimit"]
    assert not pod["automountServiceAccountToken"]
    assert not pod["enableServiceLinks"]


def variables(container):
    return {one["name"]: one.get("value") for one in container["env"]}


@pytest.mark.parametrize(
    ("kind", "name", "keys", "mounted"),
    [
        (
            "Deployment",
            "statsd-bn-server",
            "/keys",
            {"server.key_secret": "server.key_secret", "replica.key": "clients/replica.key"},
        ),
        ("Job", "statsd-bn-replica", "/keys/replica.key_secret", None),
    ],
    ids=["server", "replica"],
)
def test_only_the_user_of_a_pod_can_read_the_keys_of_the_pod(kind, name, keys, mounted):
    workload = named(kind, name)
    pod = workload["spec"]["template"]["spec"]
    assert variables(pod["containers"][0])["STATSD_BN_CURVE"] == keys
    assert not [one for one in MANIFESTS if "STATSD_BN_INSECURE" in str(one)]
    (secret,) = [one["secret"] for one in pod["volumes"] if "secret" in one]
    assert (secret["secretName"], secret["defaultMode"]) == (name, 0o400)
    # Root owns the files of a Secret; the pod's user reads them through their group.
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
    (mount,) = [one for one in pod["containers"][0]["volumeMounts"] if one["name"] == "keys"]
    assert (mount["mountPath"], mount["readOnly"]) == ("/keys", True)
    items = secret.get("items")
    assert (items and {one["key"]: one["path"] for one in items}) == mounted
    # The init container that waits for the server has no key, and needs none.
    assert not [one for container in pod.get("initContainers", []) for one in container.get("volumeMounts", [])]


def test_the_page_creates_the_secrets_that_the_pods_need():
    page = (FOLDER.parent / "README.md").read_text()
    made = {
        name: {Path(file).name for file in re.findall(r"--from-file=(\S+)", files)}
        for name, files in re.findall(
            r"^kubectl create secret generic (\S+)((?: --from-file=\S+)+)$", page, re.MULTILINE
        )
    }
    server = named("Deployment", "statsd-bn-server")["spec"]["template"]["spec"]["volumes"][0]["secret"]
    key = variables(containers(named("Job", "statsd-bn-replica"))[0])["STATSD_BN_CURVE"]
    assert made == {"statsd-bn-server": {one["key"] for one in server["items"]}, "statsd-bn-replica": {Path(key).name}}


def test_the_view_has_a_token_and_may_reach_the_server_like_a_member():
    view = named("Deployment", "statsd-bn-view")["spec"]["template"]
    (container,) = view["spec"]["containers"]
    (token,) = [one["valueFrom"]["secretKeyRef"] for one in container["env"] if one["name"] == "STATSD_BN_VIEW_TOKEN"]
    page = (FOLDER.parent / "README.md").read_text()
    assert f"kubectl create secret generic {token['name']} --from-literal={token['key']}=" in page
    (members,) = named("NetworkPolicy", "statsd-bn-server")["spec"]["ingress"][0]["from"]
    assert members["podSelector"]["matchLabels"].items() <= view["metadata"]["labels"].items()
    assert variables(container)["STATSD_BN_ENDPOINT"] == "tcp://statsd-bn-server:5555"
    (keys,) = view["spec"]["volumes"]
    assert keys["secret"] == {"secretName": "statsd-bn-replica", "defaultMode": 0o400}
    (port,) = container["ports"]
    assert view["metadata"]["annotations"] == {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(port["containerPort"]),
        "prometheus.io/path": "/metrics",
    }


def test_only_prometheus_reaches_the_view_and_the_view_reaches_only_the_server_and_dns():
    view, replica = (named("NetworkPolicy", name)["spec"] for name in ("statsd-bn-view", "statsd-bn-replica"))
    assert view["policyTypes"] == ["Ingress", "Egress"]
    assert peers(view, "egress") == peers(replica, "egress")[1:]
    (((who,), ports),) = peers(view, "ingress")
    assert who["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "prometheus"}
    assert ports == [8321]


def peers(policy, direction):
    """The peers and the ports in each rule of a policy."""
    key = {"ingress": "from", "egress": "to"}[direction]
    return [([*rule[key]], [one["port"] for one in rule.get("ports", [])]) for rule in policy[direction]]


def test_the_server_reaches_nobody_and_replicas_reach_only_each_other_the_server_and_dns():
    server, replica = (named("NetworkPolicy", name)["spec"] for name in ("statsd-bn-server", "statsd-bn-replica"))
    assert server["policyTypes"] == replica["policyTypes"] == ["Ingress", "Egress"]
    assert server["egress"] == []
    assert replica["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "statsd-bn-replica"}
    labels = named("Job", "statsd-bn-replica")["spec"]["template"]["metadata"]["labels"]
    assert replica["podSelector"]["matchLabels"].items() <= labels.items()
    one_another = ([{"podSelector": replica["podSelector"]}], [])
    assert peers(replica, "ingress") == [one_another]
    to_server = ([{"podSelector": server["podSelector"]}], [5555])
    first, second, ((dns,), ports) = peers(replica, "egress")
    assert (first, second) == (one_another, to_server)
    assert dns["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "kube-system"}
    assert ports == [53, 53]


def test_there_is_one_server_with_probes_and_only_members_reach_it():
    server = named("Deployment", "statsd-bn-server")
    assert (server["spec"]["replicas"], server["spec"]["strategy"]) == (1, {"type": "Recreate"})
    (container,) = containers(server)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["exec"]["command"] == ["python", "-m", "server", "check"]
        # A shorter limit would end the command before it could print the reason.
        assert container[probe]["timeoutSeconds"] > 3
    labels = server["spec"]["template"]["metadata"]["labels"]
    assert named("Service", "statsd-bn-server")["spec"]["selector"] == labels
    policy = named("NetworkPolicy", "statsd-bn-server")["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    members = policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    assert members.items() <= named("Job", "statsd-bn-replica")["spec"]["template"]["metadata"]["labels"].items()


def test_the_replicas_get_their_rank_and_the_address_of_rank_0():
    job = named("Job", "statsd-bn-replica")["spec"]
    replica = containers(named("Job", "statsd-bn-replica"))[0]
    values = variables(replica)
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"] == int(values["WORLD_SIZE"])
    assert 8 % int(values["WORLD_SIZE"]) == 0
    assert values["STATSD_BN_ENDPOINT"] == "tcp://statsd-bn-server:5555"
    # Pods of an Indexed Job are named JOB-INDEX, and have a name in the network through a headless service.
    headless = named("Service", job["template"]["spec"]["subdomain"])["spec"]
    assert (headless["clusterIP"], headless["publishNotReadyAddresses"]) == ("None", True)
    assert values["MASTER_ADDR"] == f"statsd-bn-replica-0.{job['template']['spec']['subdomain']}"
    assert int(values["MASTER_PORT"]) == headless["ports"][0]["port"]
