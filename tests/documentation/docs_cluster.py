"""A stand-in for a cluster: what `kubectl apply` asks of an API server, and nothing that would start a pod.

It takes objects of the kinds in `KINDS`; `test_kubernetes.py` holds them against Kubernetes' own schemas.
"""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# By API version: the kinds, by the name in their path.
KINDS = {
    "v1": {"services": "Service"},
    "apps/v1": {"deployments": "Deployment"},
    "batch/v1": {"jobs": "Job"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
}
VERSION = "1.32"

Object = dict[str, Any]


class Cluster(ThreadingHTTPServer):
    """Takes objects at `url`, and keeps them in `objects` by kind and name."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.objects: dict[tuple[str, str], Object] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Serves one while the block runs."""
    with Cluster() as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        try:
            yield found
        finally:
            found.shutdown()
            thread.join()


class _Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Cluster

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path in ABOUT:
            self._answer(HTTPStatus.OK, ABOUT[path])
        else:
            code = HTTPStatus.NOT_FOUND
            status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": "NotFound"}
            self._answer(code, {**status, "message": f"{path} is not here"})

    def do_POST(self) -> None:
        found = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.objects[found["kind"], found["metadata"]["name"]] = found
        self._answer(HTTPStatus.CREATED, found)

    def log_message(self, *_: object) -> None:
        """A request is nothing to tell of."""

    def _answer(self, code: HTTPStatus, body: Mapping[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def _group(version: str) -> str:
    return version.rpartition("/")[0]


def _root(version: str) -> str:
    return f"apis/{version}" if _group(version) else f"api/{version}"


def _resources(version: str) -> Object:
    verbs = ["create", "get", "patch"]
    found = [{"name": name, "kind": kind, "namespaced": True, "verbs": verbs} for name, kind in KINDS[version].items()]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": found}


def _openapi(version: str) -> Object:
    """That it looks for fields that nobody knows: else kubectl would ask for all schemas and do so itself."""
    parameter = {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}
    paths = {
        f"/{_root(version)}/namespaces/{{namespace}}/{name}/{{name}}": {
            "patch": {
                "parameters": [parameter],
                "x-kubernetes-group-version-kind": {
                    "group": _group(version),
                    "version": version.rpartition("/")[2],
                    "kind": kind,
                },
            }
        }
        for name, kind in KINDS[version].items()
    }
    return {"openapi": "3.0.0", "paths": paths}


def _groups() -> Object:
    named = [
        {"name": _group(version), "versions": [{"groupVersion": version, "version": version.rpartition("/")[2]}]}
        for version in KINDS
        if _group(version)
    ]
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": named}


# What it tells of itself, by path.
ABOUT: dict[str, Object] = {
    "/version": {"major": VERSION.partition(".")[0], "minor": VERSION.partition(".")[2], "gitVersion": f"v{VERSION}.0"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": _groups(),
    "/openapi/v3": {"paths": {_root(one): {"serverRelativeURL": f"/openapi/v3/{_root(one)}"} for one in KINDS}},
    **{f"/{_root(one)}": _resources(one) for one in KINDS},
    **{f"/openapi/v3/{_root(one)}": _openapi(one) for one in KINDS},
}
