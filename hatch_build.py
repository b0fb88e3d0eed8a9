"""Build hook of wheels and editable installs: compiles the native core, or leaves the wheel without it."""

import runpy
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("client", "native")


class NativeCore(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the library into the wheel, which then fits only this platform, but any Python version."""

    PLUGIN_NAME = "custom"

    _scratch: TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles with the compiler that is found; a failure only prints a warning.

        Args:
            version: "editable", where the library goes beside its sources; else "standard".
            build_data: what hatchling is to do.
        """
        here = Path(self.root) / NATIVE
        self._scratch = None if version == "editable" else TemporaryDirectory()
        folder = Path(self._scratch.name) if self._scratch else here
        build = runpy.run_path(str(here / "build.py"))
        if reason := build["compile_core"](folder):
            self.app.display_warning(f"statsd_bn is built without its native core: {reason}")
            return
        if self._scratch:
            build_data["force_include"][str(folder / build["LIBRARY"])] = (NATIVE / build["LIBRARY"]).as_posix()
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002 - the interface's
        """Removes the folder in which the library was compiled for the wheel."""
        if self._scratch:
            self._scratch.cleanup()
