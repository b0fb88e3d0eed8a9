"""The dashboard for Grafana conforms to the schema in Grafana's SDK."""

import json
from typing import Any

import pytest

from support.paths import ROOT

DASHBOARD = ROOT / "docker" / "monitoring" / "dashboard.json"


def as_grafana_reads_it(board: dict[str, Any]) -> Any:
    """Read a dashboard into the schema's classes, which drop unknown fields, and write it again."""
    plugins = pytest.importorskip("grafana_foundation_sdk.cog.plugins", reason="needs grafana-foundation-sdk")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder  # noqa: PLC0415
    from grafana_foundation_sdk.models.dashboard import Dashboard  # noqa: PLC0415

    plugins.register_default_plugins()  # the types of panels and data sources
    return json.loads(JSONEncoder().encode(Dashboard.from_json(board)))


def unknown(mine: Any, read: Any, path: str = "") -> list[str]:
    if isinstance(mine, dict) and isinstance(read, dict):
        return [found for key, value in mine.items() for found in unknown(value, read.get(key), f"{path}/{key}")]
    if isinstance(mine, list) and isinstance(read, list) and len(mine) == len(read):
        pairs = zip(mine, read, strict=True)
        return [found for number, (one, other) in enumerate(pairs) for found in unknown(one, other, f"{path}/{number}")]
    return [] if mine == read else [path]


def test_grafanas_schema_has_every_field_of_the_dashboard():
    board = json.loads(DASHBOARD.read_text())
    assert unknown(board, as_grafana_reads_it(board)) == []


@pytest.mark.parametrize("path", ["/panels/0/titel", "/panels/0/targets/0/query"])
def test_a_field_unknown_to_grafana_is_found(path):
    board = json.loads(DASHBOARD.read_text())
    *parents, name = path.strip("/").split("/")
    place = board
    for key in parents:
        place = place[int(key) if key.isdigit() else key]
    place[name] = "statsd_bn"
    assert unknown(board, as_grafana_reads_it(board)) == [path]
