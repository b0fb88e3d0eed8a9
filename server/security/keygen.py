"""`python -m server keygen DIR`: makes keys, in files that nobody else can read; and where a server finds its keys.

`keygen` only ever adds files. A folder that has a server's keys already gets further clients. A server reads its keys
from such a folder, or for one job from standard input.
"""

import os
import secrets
import stat
import sys
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import zmq
from zmq.utils import z85

from statsd_bn import keys
from statsd_bn.errors import ConfigurationError
from statsd_bn.keys import ClientKeys, Pair, PublicKey

PRIVATE_FILE = 0o600
PRIVATE_FOLDER = 0o700

# 256 bits.
SECRET_BYTES = 32

SECRET_NOTE = "# Whoever has this file is what it names: keep it private.\n"  # noqa: S105 - a comment in the file
PUBLIC_NOTE = "# A client's public key, which the server lets in while this file is here; SIGHUP reads it again.\n"


def generate(folder: str | Path, clients: Sequence[str] = (), jobs: Sequence[str] = (), tenant: str = "") -> list[Path]:
    """Makes a key pair for each client, and one for the server if it has no keys yet.

    Args:
        folder: where to; it is made if it is not there.
        clients: their names; default: "client".
        jobs: patterns of the names of jobs that these keys are for; default: all jobs.
        tenant: whose keys these are, which share its limits; default: each is a tenant of its own.

    Returns:
        The files that were written.

    Raises:
        ConfigurationError: a file is there already, a name is unusable, or the folder cannot be written, or others
            can write to it.
    """
    check_curve()
    folder = Path(folder)
    names = [keys.check_name(name) for name in dict.fromkeys(clients or (keys.DEFAULT_CLIENT,))]
    note = _lines(tenant=keys.check_name(tenant)) if tenant else ""
    try:
        for place in _folders(folder):
            check_folder(place)
        return _write(folder, _contents(folder, names, _patterns(jobs) + note))
    except OSError as error:
        raise ConfigurationError(f"keygen: cannot write {error.filename}: {error.strerror}") from error


def write_secret(file: str | Path) -> None:
    """Writes the secret of a job on several nodes, which the client reads where STATSD_BN_SECRET_FILE names it.

    Raises:
        ConfigurationError: there is a file already, others can write to the folder, or it cannot be written.
    """
    path = Path(file)
    if path.exists():
        raise ConfigurationError(f"secret: expected no such file, and found {path}; nothing was written")
    try:
        _check_for_secret(path.parent)
        _write_private(path, f"{secrets.token_hex(SECRET_BYTES)}\n")
    except OSError as error:
        raise ConfigurationError(f"secret: cannot write {path}: {error.strerror}") from error


def _check_for_secret(folder: Path) -> None:
    # The file is new, and read by whoever wrote it: a group that shares a folder, as a umask of 002 has it, is trusted.
    real = folder.resolve(strict=True)
    for each in (real, *real.parents):
        _check_folder(each, stat.S_IWOTH, "secret", may_be_shared=True)


def check_folder(folder: Path) -> None:
    """Raises ConfigurationError if somebody else could replace what is written to a folder, or add to it.

    A folder that is not there yet is made private; what lies above it counts.
    """
    there = folder.absolute()
    while not os.path.lexists(there):
        there = there.parent
    real = there.resolve(strict=True)
    is_there = there == folder.absolute()
    _check_folder(real, stat.S_IWOTH | stat.S_IWGRP * is_there, may_be_shared=not is_there)
    for above in real.parents:
        # Where a group shares a folder its members trust one another with what lies in it.
        _check_folder(above, stat.S_IWOTH, may_be_shared=True)


def _check_folder(folder: Path, writable: int, what: str = "keys", *, may_be_shared: bool) -> None:
    """Raises ConfigurationError if others can write to a folder, or it is theirs.

    Args:
        folder: which one.
        writable: the modes by which others can.
        what: is written there, for people.
        may_be_shared: whether it may be one such as /tmp, where all may add files, and replace only their own.
    """
    found = folder.stat()
    if found.st_uid not in {0, os.getuid()}:
        raise ConfigurationError(
            f"{what}: expected {folder} to belong to this user (uid {os.getuid()}), got uid {found.st_uid}, who could "
            "replace what is written there; give a folder of your own"
        )
    if found.st_mode & writable and not (may_be_shared and found.st_mode & stat.S_ISVTX):
        raise ConfigurationError(
            f"{what}: expected only this user to be able to write to {folder}, got mode "
            f"{stat.S_IMODE(found.st_mode):04o}; chmod go-w {folder}, or give another folder"
        )


def _folders(folder: Path) -> tuple[Path, ...]:
    return (folder, folder / keys.PUBLIC_FOLDER, folder / keys.SECRET_FOLDER)


def check_curve() -> None:
    """Raises ConfigurationError if this machine's ZeroMQ has no CURVE."""
    if not zmq.has("curve"):
        raise ConfigurationError(f"curve: libzmq {zmq.zmq_version()} was built without it; install pyzmq from a wheel")


def _contents(folder: Path, names: Sequence[str], rights: str) -> dict[Path, str]:
    contents: dict[Path, str] = {}
    if (folder / keys.SERVER_SECRET).exists():
        server = keys.load_server(folder)
    else:
        server = _pair()
        contents[folder / keys.SERVER_SECRET] = SECRET_NOTE + _lines(public_key=server.public, secret_key=server.secret)
        contents[folder / keys.SERVER_PUBLIC] = _lines(public_key=server.public)
    for name in names:
        pair = _pair()
        secret = _lines(public_key=pair.public, secret_key=pair.secret, server_key=server.public)
        contents[folder / keys.SECRET_FOLDER / keys.secret_name(name)] = SECRET_NOTE + secret
        public = folder / keys.PUBLIC_FOLDER / keys.public_name(name)
        contents[public] = PUBLIC_NOTE + _lines(public_key=pair.public) + rights
    return contents


def _pair() -> Pair:
    public, secret = zmq.curve_keypair()
    return Pair(public.decode(), secret.decode())


def _lines(**values: str) -> str:
    # Z85 has neither quotes nor backslashes.
    return "".join(f'{name.replace("_", "-")} = "{value}"\n' for name, value in values.items())


def _patterns(jobs: Sequence[str]) -> str:
    if bad := [pattern for pattern in jobs if not (pattern.isprintable() and pattern)]:
        raise ConfigurationError(f"jobs: expected patterns of printable letters, got {bad[0]!r:.80}")
    # A literal string of TOML ends with the first apostrophe, and a basic one has escapes.
    quoted = ['"' + pattern.replace("\\", "\\\\").replace('"', '\\"') + '"' for pattern in jobs or ("*",)]
    return f"{keys.JOBS} = [{', '.join(quoted)}]\n"


def _write(folder: Path, contents: dict[Path, str]) -> list[Path]:
    if taken := [str(path) for path in contents if path.exists()]:
        raise ConfigurationError(f"keygen: expected no such files, and found {', '.join(taken)}; nothing was written")
    for place in _folders(folder):
        place.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    for path, text in contents.items():
        _write_private(path, text)
    return list(contents)


def _write_private(path: Path, text: str) -> None:
    # EXCL, so that a file that has come meanwhile is not overwritten either; private from the beginning.
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE)
    with os.fdopen(opened, "w", encoding="utf-8") as file:
        file.write(text)


KEY_BYTES = 32

# In place of a folder: whoever starts the server hands its keys over, and no file has them.
STANDARD_INPUT = "-"


def load(curve: str) -> tuple[Pair, list[PublicKey]]:
    """Returns the server's pair, and whom it lets in.

    Raises:
        ConfigurationError: a file is missing or not sound.
    """
    if curve != STANDARD_INPUT:
        return keys.load_server(curve), keys.load_clients(curve)
    found = keys.parse_server(sys.stdin.read(keys.MAX_FILE_BYTES), "standard input")
    return found.pair, [PublicKey(found.client, found.client_key)]


def operator(pair: Pair) -> Pair:
    """Returns the pair that a server lets in to ask only; it follows from the server's own."""
    check_curve()
    made = blake2b(b"operator", key=pair.secret.encode(), digest_size=KEY_BYTES, person=b"statsd_bn").digest()
    secret = z85.encode(made)
    return Pair(zmq.curve_public(secret).decode(), secret.decode())


def load_asking(curve: str) -> ClientKeys:
    """Returns the keys to ask a server with: the operator's from the server's own folder, else a client's.

    Raises:
        ConfigurationError: there is no such file, or it holds no keys.
    """
    if not os.access(Path(curve) / keys.SERVER_SECRET, os.F_OK):
        return keys.load_client(curve)
    pair = keys.load_server(curve)
    return ClientKeys(operator(pair), pair.public)


def load_again(curve: str) -> tuple[list[PublicKey], list[ConfigurationError]]:
    """Returns whom the server lets in from now on, and what is wrong with the files that are not sound.

    Raises:
        ConfigurationError: nothing can be said of any.
    """
    if curve == STANDARD_INPUT:
        raise ConfigurationError("curve: expected a folder, to read keys again, got standard input")
    return keys.load_sound_clients(curve)
