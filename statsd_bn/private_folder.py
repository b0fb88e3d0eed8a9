"""The folder of this user on this host, where nobody else gets in."""

import os
import stat
from pathlib import Path

from statsd_bn.errors import ConfigurationError


def private_folder() -> Path:
    """Returns the folder, and makes it if it is not there.

    Raises:
        ConfigurationError: it is not this user's alone, or cannot be made.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(runtime) / "statsd_bn" if runtime else Path(f"/tmp/statsd_bn-{os.getuid()}")  # noqa: S108 - checked below
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise ConfigurationError(f"private folder: cannot make {path}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != 0o700:
        raise ConfigurationError(
            f"private folder: expected {path} to be a folder of user {os.getuid()} with mode 0700, "
            f"got mode {found.st_mode:o} of user {found.st_uid}; remove it, or set XDG_RUNTIME_DIR"
        )
    return path
