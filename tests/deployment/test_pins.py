"""Requirements admit no release with a known vulnerability, and the images install packages by version and hash."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from support.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINNED = sorted((ROOT / "docker" / "requirements").glob("*.txt"))

# Vulnerable or compromised releases of dependencies and test tools, with the advisory.
KNOWN_BAD = {
    "lightning": {"2.6.2": "GHSA-w37p-236h-pfx3", "2.6.3": "GHSA-w37p-236h-pfx3", "2.6.5": "CVE-2026-58659"},
    "pytorch-lightning": {"2.6.2": "GHSA-w37p-236h-pfx3", "2.6.3": "GHSA-w37p-236h-pfx3", "2.6.5": "CVE-2026-58659"},
    "msgpack": {"1.2.0": "GHSA-6v7p-g79w-8964"},
    "torch": {"2.5.1": "CVE-2025-32434"},
    "scikit-learn": {"1.4.2": "CVE-2024-5206"},
    "pytest": {"9.0.2": "CVE-2025-71176"},
}


def admitted() -> list[Requirement]:
    """All requirements in pyproject.toml on other packages."""
    project = PROJECT["project"]
    extras = project["optional-dependencies"].values()
    found = [Requirement(text) for one in (project["dependencies"], *extras) for text in one]
    return [one for one in found if one.name != project["name"]]


def pins(path: Path) -> dict[str, set[Version]]:
    """The versions by package, in a file of lines `name==version`; several versions if they depend on the platform."""
    found: dict[str, set[Version]] = {}
    for name, version in re.findall(r"^([\w.-]+)==([^\s;\\]+)", path.read_text(), re.MULTILINE):
        found.setdefault(canonicalize_name(name), set()).add(Version(version))
    return found


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


@pytest.mark.parametrize("name", KNOWN_BAD)
def test_no_release_that_is_known_to_be_bad_is_admitted(name):
    matches = [one for one in admitted() if one.name == name]
    assert matches
    for requirement in matches:
        for version, advisory in KNOWN_BAD[name].items():
            assert version not in requirement.specifier, f"{requirement} admits {version}: {advisory}"


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-oldest.txt"])
def test_no_constraint_is_a_release_that_is_known_to_be_bad(name):
    for package, versions in pins(ROOT / name).items():
        assert not {str(one) for one in versions} & KNOWN_BAD.get(package, {}).keys()


@pytest.mark.parametrize("path", PINNED, ids=lambda path: path.stem)
def test_the_images_requirements_are_versions_with_hashes_and_nothing_else(path):
    # The expression matches neither options, which could name another index, nor addresses.
    one = (
        r"[\w.-]+==[\w.+]+(?: ; [^\n\\]+)? \\\n(?:    --hash=sha256:[0-9a-f]{64} \\\n)*    --hash=sha256:[0-9a-f]{64}\n"
    )
    assert re.fullmatch(rf"(?:#.*\n)*(?:{one})+", path.read_text())


@pytest.mark.parametrize("path", PINNED, ids=lambda path: path.stem)
def test_the_images_hold_the_versions_that_are_tested(path):
    tested = pins(ROOT / "constraints.txt")
    for name in pins(path).keys() & tested:
        (wanted,) = tested[name]
        # torch's CPU build has a local version.
        found = {version.public for version in pins(path)[name]}
        assert found == {wanted.public}, f"{path.name}: {name}; scripts/pin writes it anew"


def test_the_images_hold_what_the_project_asks_for():
    found = {path.stem: pins(path).keys() for path in PINNED}
    project = PROJECT["project"]
    demo = [text for text in project["optional-dependencies"]["demo"] if not text.startswith(project["name"])]
    assert found.keys() == {"build", "compiler", "server", "view", "replica", "replica-cpu"}
    assert names(PROJECT["build-system"]["requires"]) <= found["build"]
    assert names(project["dependencies"]) <= found["server"] <= found["replica"]
    for replica in ("replica", "replica-cpu"):
        assert names([*project["dependencies"], *demo, "torch"]) <= found[replica]
    assert "torch" not in found["server"] | found["view"]
    view = names(project["optional-dependencies"]["view"])
    assert names(project["dependencies"]) | view <= found["view"]
    assert not view & found["server"]


def test_the_images_install_by_hash_alone():
    script = (ROOT / "docker" / "install").read_text().replace("\\\n", " ")
    installs = re.findall(r"^(?:\S+=\S+ )?install_into .*$", script, re.MULTILINE)
    assert len(installs) == 3
    *others, own = installs
    assert all("--require-hashes --only-binary :all:" in one for one in others)
    assert "--no-index" in own
    assert "PIP_FIND_LINKS=$PWD/dist" in own
    assert "--require-hashes" in (ROOT / "docker" / "fetch-wheels").read_text()


BASE_IMAGE_FILES = ("docker/Dockerfile", "docker/docker-compose.yml", "docker/docker-compose.view.yml")


def base_images(folder: Path) -> set[str]:
    return {
        found
        for name in BASE_IMAGE_FILES
        for found in re.findall(r"python:3\.11-slim-bookworm[\w@:]*", (folder / name).read_text())
    }


def test_the_base_image_is_the_same_everywhere():
    (image,) = base_images(ROOT)
    assert re.fullmatch(r"python:3\.11-slim-bookworm@sha256:[0-9a-f]{64}", image)


@pytest.fixture
def pin(tmp_path):
    """Runs a copy of scripts/pin with stand-ins for uv and for an engine; the engine's pull gives a digest or fails."""
    for name in ("scripts/pin", "scripts/lib.sh", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "docker" / "requirements").mkdir(parents=True)
    for name in BASE_IMAGE_FILES:
        text = re.sub(r"(slim-bookworm)@sha256:\w+", r"\1", (ROOT / name).read_text())
        (tmp_path / name).write_text(text)
    programs = tmp_path / ".venv-pin" / "bin"
    programs.mkdir(parents=True)
    wanted = subprocess.run(
        ["/bin/sh", "-c", "cat pyproject.toml constraints.txt | cksum"], cwd=tmp_path, capture_output=True, check=True
    )
    (programs.parent / "installed-pin").write_bytes(wanted.stdout)
    stand_in(programs / "python", "")
    stand_in(programs / "uv", 'echo "$@" >>uv-calls\ncat >/dev/null\n')

    def run(digest: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        script = (
            f'[ "$1" = pull ] || echo docker.example/python@{digest}\n' if digest else "echo no registry >&2; exit 1\n"
        )
        stand_in(programs / "docker", script)
        path = os.pathsep.join([str(programs), os.environ["PATH"]])
        return subprocess.run(
            [tmp_path / "scripts" / "pin", *arguments],
            env={**os.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=check,
        )

    return run


def stand_in(path: Path, text: str) -> None:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)


def test_the_base_image_is_pinned_to_the_digest_that_an_engine_pulls_and_can_be_pinned_again(pin, tmp_path):
    for letter in "ab":
        digest = "sha256:" + letter * 64
        pin(digest)
        assert base_images(tmp_path) == {f"python:3.11-slim-bookworm@{digest}"}
    calls = (tmp_path / "uv-calls").read_text()
    for name in ("build", "compiler", "server", "view", "replica", "replica-cpu"):
        assert f"--output-file docker/requirements/{name}.txt" in calls
    assert all("--generate-hashes" in line for line in calls.splitlines())


def test_without_an_image_registry_the_tag_stays_and_a_message_names_the_remaining_step(pin, tmp_path):
    assert "The base image is not pinned" in pin("").stderr
    assert base_images(tmp_path) == {"python:3.11-slim-bookworm"}


def test_a_given_digest_is_written_and_packages_are_not_pinned(pin, tmp_path):
    for letter in "ab":
        digest = "sha256:" + letter * 64
        pin("", "--digest", digest)
        assert base_images(tmp_path) == {f"python:3.11-slim-bookworm@{digest}"}
    assert not (tmp_path / "uv-calls").exists()


@pytest.mark.parametrize("digest", ["", "sha256:", "a" * 64, "sha256:" + "A" * 64, "sha256:" + "a" * 65])
def test_an_invalid_digest_is_not_written(pin, tmp_path, digest):
    assert pin("", "--digest", digest, check=False).returncode != 0
    assert base_images(tmp_path) == {"python:3.11-slim-bookworm"}
