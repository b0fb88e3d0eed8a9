"""Hooks of mkdocs (`mkdocs.yml`) for pages that are written for a code host.

- The home page is docs/index.md, and every page that another page links to is in the site, such as the benchmarks'.
- Links to files of the code lead to copies in the site, links to folders to lists of their files.
- The pages of the API are generated from the public names below and their docstrings.

Links to files that do not exist stay unchanged, and mkdocs reports them.
"""

import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = "docs/"

# Places in the site of pages outside docs/ that differ from their paths.
PLACES = {
    "README.md": "readme.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
}

LINK = re.compile(r'\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?( "[^"]*")?\)')


@dataclass(frozen=True)
class Api:
    """A page of the API: public names of one purpose."""

    title: str
    about: str
    names: Sequence[str]


API = {
    "layers": Api(
        "Layers and conversion",
        "The layers, and the conversion of models.",
        [
            "client.convert_model",
            "client.revert_model",
            "client.patch_sync_batchnorm",
            "client.conversion_report",
            "client.ConversionReport",
            "client.register_conversion",
            "client.set_sbn_eps_mode",
            "client.synchronized_class",
            "client.Group",
            "client.SynchronizedBatchNorm",
            "client.SynchronizedBatchNorm1d",
            "client.SynchronizedBatchNorm2d",
            "client.SynchronizedBatchNorm3d",
            "client.LazySynchronizedBatchNorm1d",
            "client.LazySynchronizedBatchNorm2d",
            "client.LazySynchronizedBatchNorm3d",
            "client.commit_running_statistics",
        ],
    ),
    "connection": Api(
        "Connection",
        "The connection of a process to the other ranks of its job.",
        [
            "client.connect",
            "client.disconnect",
            "client.current_connection",
            "client.local_group",
            "client.Connection",
            "client.SlavePipe",
        ],
    ),
    "data_parallel": Api(
        "Replicas in one process",
        "`nn.DataParallel` with synchronised replicas.",
        [
            "client.DataParallelWithCallback",
            "client.patch_replication_callback",
            "client.execute_replication_callbacks",
            "client.CallbackContext",
        ],
    ),
    "training": Api(
        "Around the training loop",
        "Uneven data, precise statistics, gradients, moments, loaders and measurements.",
        [
            "client.join",
            "client.recalibrate",
            "client.average_gradients",
            "client.moments",
            "client.BatchMoments",
            "client.RunningMoments",
            "client.smart_ddp",
            "client.smart_DDP",
            "client.DDPHandler",
        ],
    ),
    "elastic": Api(
        "Elastic training",
        "Training while ranks leave and join; see [elastic.md](../elastic.md).",
        ["client.run_elastic", "client.ElasticState", "client.ElasticSampler", "client.MembersChanged"],
    ),
    "lightning": Api(
        "Lightning",
        "The plugin and the callback for Lightning's Trainer; see [frameworks.md](../frameworks.md#lightning).",
        ["client.integrations.lightning.StatsdBNLayerSync", "client.integrations.lightning.StatsdBNMetrics"],
    ),
    "mmengine": Api(
        "MMEngine",
        "The hook for MMEngine's Runner; see [frameworks.md](../frameworks.md#mmengine-mmcv).",
        ["client.integrations.mmengine.StatsdBNHook"],
    ),
    "monai": Api(
        "MONAI",
        "The norm for MONAI's networks; see [frameworks.md](../frameworks.md#monai).",
        ["client.integrations.monai.statsd_batch_factory"],
    ),
    "server": Api(
        "Server",
        "The server in code. On a command line it is `python -m server` ([configuration.md](../configuration.md)).",
        ["server.run_master", "server.Config", "server.Service", "server.SyncMaster", "server.FutureResult"],
    ),
    "errors": Api(
        "Errors",
        "The errors; [errors.md](../errors.md) has their causes and remedies.",
        ["statsd_bn.errors"],
    ),
}

_sources: dict[str, str] = {}
"""Files of the repository, by their places in the site."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages outside docs/, copies of linked files, and the API's pages."""
    _sources.clear()
    for name, page in API.items():
        files.append(File.generated(config, f"api/{name}.md", content=_api(page)))
    waiting = [*PLACES, *(f"{DOCS}{path.name}" for path in sorted((ROOT / DOCS).glob("*.md")))]
    while waiting:
        path = waiting.pop()
        place = place_of(path)
        if place in _sources:
            continue
        _sources[place] = path
        if path.startswith(DOCS) and not place.endswith(".md"):
            continue  # mkdocs copies it, such as an image
        text = _text(path)
        if not path.startswith(DOCS):
            files.append(File.generated(config, place, content=text))
        if place.endswith(".md"):
            waiting += [target for target, _, _ in _targets(path, text)]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 - mkdocs' names
    """Replaces a page's links by links to places in the site."""
    place = page.file.src_uri
    path = _sources.get(place)
    if path is None:
        return markdown
    for target, whole, rest in _targets(path, markdown):
        link = posixpath.relpath(place_of(target), posixpath.dirname(place))
        markdown = markdown.replace(whole, f"]({link}{rest})")
    return markdown


def place_of(path: str) -> str:
    """Returns the place in the site of a file or folder of the repository."""
    if path in PLACES:
        return PLACES[path]
    if path.startswith(DOCS):
        return path.removeprefix(DOCS)
    if path.endswith(".md"):
        return path
    return f"files/{path}/index.md" if (ROOT / path).is_dir() else f"files/{path}.txt"


def _targets(path: str, text: str) -> Iterator[tuple[str, str, str]]:
    """Yields a page's links into the repository: the path, the link as written, and its anchor and title."""
    base = path if (ROOT / path).is_dir() else posixpath.dirname(path)
    for match in LINK.finditer(text):
        target = posixpath.normpath(posixpath.join(base, match[1]))
        if not target.startswith("..") and (ROOT / target).exists():
            yield target, match[0], f"{match[2] or ''}{match[3] or ''}"


def _text(path: str) -> str:
    file = ROOT / path
    if not file.is_dir():
        return file.read_text(encoding="utf-8")
    inside = sorted(one for one in file.iterdir() if not one.name.startswith((".", "__pycache__")))
    lines = [f"- [{one.name}]({one.name})" for one in inside if one.is_dir() or _is_text(one)]
    return "\n".join([f"# {path}", "", *lines, ""])


def _is_text(file: Path) -> bool:
    try:
        file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _api(page: Api) -> str:
    return "\n\n".join([f"# {page.title}", page.about, *(f"::: {name}" for name in page.names)]) + "\n"
