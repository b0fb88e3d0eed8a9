"""Where the key of the seals comes from: a secret that outlives this process, if there is one."""

import hashlib
import logging
import os
import stat
from contextlib import suppress
from pathlib import Path

from server.rounds.seals import NO_SEALS, Seals
from statsd_bn.error_text import in_log
from statsd_bn.errors import ConfigurationError
from statsd_bn.private_folder import make_private, private_folder

logger = logging.getLogger("statsd_bn.server")

NAME = "seal.key"

# As many as SHA-256 gives: more would make no seal harder to guess.
KEY_BYTES = 32

# What tells this use of the server's secret key from any other; blake2b takes 16 bytes for it.
_PURPOSE = b"statsd_bn seals"


def seals_of(secret: str | None, *, is_for_user: bool = False) -> Seals:
    """Returns the seals of a server.

    Args:
        secret: its secret CURVE key; without one the key is in a file of this user, or if there can be none, new.
        is_for_user: whether only this user can connect; without keys there are no seals then, because this user could
            as well change the server itself.
    """
    if is_for_user and not secret:
        return NO_SEALS
    if secret:
        return Seals(hashlib.blake2b(secret.encode(), digest_size=KEY_BYTES, person=_PURPOSE).digest(), outlives=True)
    try:
        folder = private_folder(os.environ)
        make_private(folder)
        key, is_old = load_or_make(folder)
    except ConfigurationError as error:
        logger.info(
            "a server that takes the place of this one will not know its results by their seals: %s", in_log(error)
        )
        key, is_old = os.urandom(KEY_BYTES), False
    return Seals(key, outlives=is_old)


def load_or_make(folder: Path) -> tuple[bytes, bool]:
    """Returns the key that a folder holds, and whether it was there before; makes it if not.

    Raises:
        ConfigurationError: what is there is no key of this user alone, or none can be written.
    """
    path = folder / NAME
    try:
        with suppress(FileNotFoundError):
            return _load(path), True
        _make(path)
        # That of another server, if it was quicker: one key for all servers of this user.
        return _load(path), False
    except OSError as error:
        raise ConfigurationError(f"key of the seals: cannot use {path}: {error.strerror}") from error


def _make(path: Path) -> None:
    """Writes a new key, unless there is one meanwhile; nobody ever sees half of it."""
    draft = path.with_name(f"{NAME}.{os.urandom(8).hex()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(os.urandom(KEY_BYTES))
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


def _load(path: Path) -> bytes:
    # A pipe that nobody writes to would hold up the server.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise ConfigurationError(
                f"key of the seals: expected {path} to be a file of user {os.getuid()} that nobody else can read, "
                f"got mode {found.st_mode:o} of user {found.st_uid}; remove it"
            )
        key = file.read(KEY_BYTES + 1)
    if len(key) != KEY_BYTES:
        raise ConfigurationError(f"key of the seals: expected {KEY_BYTES} bytes in {path}, got {len(key)}; remove it")
    return key
