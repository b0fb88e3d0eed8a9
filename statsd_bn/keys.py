"""Keys: the files that say who may speak to a server, and with which key.

A key is a CURVE key of ZeroMQ, 32 bytes written as 40 letters of Z85. The files are TOML; docs/security.md describes
them. What a file holds is never part of an error, so that no secret reaches a log.
"""

import errno
import logging
import os
import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from statsd_bn.errors import ConfigurationError

logger = logging.getLogger("statsd_bn.keys")

# As docs/security.md describes the folder that `python -m server keygen` makes.
SERVER_PUBLIC = Path("server.key")
SERVER_SECRET = Path("server.key_secret")
PUBLIC_FOLDER = Path("clients")
SECRET_FOLDER = Path("secrets")
DEFAULT_CLIENT = "client"

PUBLIC, SECRET, SERVER, JOBS, TENANT = "public-key", "secret-key", "server-key", "jobs", "tenant"
CLIENT, CLIENT_KEY = "client", "client-key"

# A key's file has 300 bytes; the rest is room for names of jobs.
MAX_FILE_BYTES = 65_536

# https://rfc.zeromq.org/spec/32
_Z85 = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")

# What becomes a file's name, and stands in logs.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Pair:
    """A public key and the secret one that belongs to it."""

    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """What a client needs to speak to a server: its own pair, and the server's public key."""

    pair: Pair
    server: str


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """What a server for one client needs, which it is handed without a file."""

    pair: Pair
    client: str
    client_key: str

    def text(self) -> str:
        """Returns it as `parse_server` takes it."""
        # Neither Z85 nor a client's name has quotes or backslashes.
        values = {PUBLIC: self.pair.public, SECRET: self.pair.secret, CLIENT: self.client, CLIENT_KEY: self.client_key}
        return "".join(f'{name} = "{value}"\n' for name, value in values.items())


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A client that is let in.

    Attributes:
        jobs: patterns of the names of jobs that it is for, as `fnmatch` has them.
        tenant: whose it is; the limits of a tenant hold for all its keys together. Empty: a tenant of its own.
    """

    name: str
    key: str
    jobs: tuple[str, ...] = ("*",)
    tenant: str = ""


def check_name(name: str) -> str:
    """Returns a client's name.

    Raises:
        ConfigurationError: it cannot be the name of a file.
    """
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"client: expected a name of 1 to 64 letters, digits and . _ -, which begins with a letter or digit, "
            f"got {name!r:.80}"
        )
    return name


def load_client(path: str | Path) -> ClientKeys:
    """Returns a client's keys.

    Args:
        path: the client's file, or the folder that `python -m server keygen` made, for the client named "client".

    Raises:
        ConfigurationError: there is no such file, or it holds no keys.
    """
    path = Path(path)
    if path.is_dir():
        path = path / SECRET_FOLDER / secret_name(DEFAULT_CLIENT)
    return _client(path, _load(path, secret=True))


def load_server(folder: str | Path) -> Pair:
    """Returns the server's keys from the folder that `python -m server keygen` made.

    Raises:
        ConfigurationError: there is no such file, or it holds no keys.
    """
    path = Path(folder) / SERVER_SECRET
    found = _load(path, secret=True)
    return Pair(_key(path, found, PUBLIC), _key(path, found, SECRET))


def parse_server(text: str, source: str) -> ServerKeys:
    """Returns the keys of a server for one client.

    Raises:
        ConfigurationError: `text` holds no keys.
    """
    found = _parse(source, text)
    pair = Pair(_key(source, found, PUBLIC), _key(source, found, SECRET))
    return ServerKeys(pair, check_name(str(found.get(CLIENT, ""))), _key(source, found, CLIENT_KEY))


def load_public(path: Path) -> PublicKey:
    """Returns whom a client's public file lets in; its name is the file's.

    Raises:
        ConfigurationError: it is no such file.
    """
    found = _load(path, secret=False)
    jobs = found.get(JOBS, ["*"])
    if not (isinstance(jobs, list) and jobs and all(isinstance(pattern, str) and pattern for pattern in jobs)):
        raise ConfigurationError(f'{path}: {JOBS}: expected patterns such as ["digits", "team-a-*"], got {jobs!r:.80}')
    tenant = found.get(TENANT, "")
    if tenant and not (isinstance(tenant, str) and _NAME.fullmatch(tenant)):
        raise ConfigurationError(f'{path}: {TENANT}: expected a name such as "team-a", got {tenant!r:.80}')
    return PublicKey(check_name(path.stem), _key(path, found, PUBLIC), tuple(jobs), tenant)


def load_clients(folder: str | Path) -> list[PublicKey]:
    """Returns whom the public files in a folder let in.

    Raises:
        ConfigurationError: one of them is no such file, or they cannot be listed.
    """
    return [load_public(path) for path in _public_files(folder)]


def load_sound_clients(folder: str | Path) -> tuple[list[PublicKey], list[ConfigurationError]]:
    """Returns whom the sound ones of the public files in a folder let in, and what is wrong with the others.

    Raises:
        ConfigurationError: they cannot be listed, or this process cannot open more files.
    """
    sound: dict[str, PublicKey] = {}
    problems = []
    for path in _public_files(folder):
        try:
            client = load_public(path)
        except ConfigurationError as error:
            if is_out_of_files(error):  # which says nothing of the key
                raise
            problems.append(error)
            continue
        if other := sound.get(client.key):
            problems.append(ConfigurationError(f"curve: {path}: expected a key of its own, got that of {other.name!r}"))
        else:
            sound[client.key] = client
    return list(sound.values()), problems


def is_out_of_files(error: ConfigurationError) -> bool:
    """Whether a file was not read because this process, or its host, has no descriptor left for it."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE)


def _public_files(folder: str | Path) -> list[Path]:
    clients = Path(folder) / PUBLIC_FOLDER
    try:
        paths = sorted(clients.iterdir())  # a glob would take a folder that cannot be read for an empty one
    except OSError as error:
        raise ConfigurationError(f"curve: cannot list {clients}: {error.strerror}") from error
    return [path for path in paths if path.name.endswith(public_name(""))]


def public_name(client: str) -> str:
    """Returns the name of a client's public file."""
    return f"{client}.key"


def secret_name(client: str) -> str:
    """Returns the name of a client's secret file."""
    return f"{client}.key_secret"


def read_secret(path: str | Path, name: str = "curve") -> str:
    """Returns the text of a file that holds a secret; warns if others can read it.

    Raises:
        ConfigurationError: it cannot be read, or is no file.
    """
    text, mode = _read(Path(path), name)
    if mode & 0o077:
        logger.warning("%s holds a secret key, and other users of this machine can read it; chmod 600", path)
    return text


def _load(path: Path, *, secret: bool) -> Mapping[str, Any]:
    return _parse(path, read_secret(path) if secret else _read(path, "curve")[0])


def _read(path: Path, name: str) -> tuple[str, int]:
    """Returns a file's text and its mode; a pipe or a device is not waited for, and a huge file is not read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            mode = os.fstat(descriptor).st_mode
            content = os.read(descriptor, MAX_FILE_BYTES + 1) if stat.S_ISREG(mode) else b""
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigurationError(f"{name}: cannot read {path}: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        raise ConfigurationError(f"{name}: expected {path} to be a file, got a folder, a pipe or a device")
    if len(content) > MAX_FILE_BYTES:
        raise ConfigurationError(f"{name}: expected at most {MAX_FILE_BYTES} bytes in {path}, got more")
    try:
        return content.decode(), mode
    except UnicodeDecodeError:
        raise _no_keys(path) from None


def _parse(source: Path | str, text: str) -> Mapping[str, Any]:
    try:
        return tomllib.loads(text)
    except ValueError:
        # The reason may quote what the file holds, so it is neither told nor kept.
        raise _no_keys(source) from None


def _no_keys(source: Path | str) -> ConfigurationError:
    return ConfigurationError(f"curve: {source} is no file of keys, as `python -m server keygen` makes it")


def _client(source: Path | str, found: Mapping[str, Any]) -> ClientKeys:
    return ClientKeys(Pair(_key(source, found, PUBLIC), _key(source, found, SECRET)), _key(source, found, SERVER))


def _key(source: Path | str, found: Mapping[str, Any], name: str) -> str:
    key = found.get(name)
    if not (isinstance(key, str) and _Z85.fullmatch(key)):
        raise ConfigurationError(
            f"curve: {source}: {name}: expected a key of 40 letters, "
            f"as `python -m server keygen` makes it, got {'none' if key is None else 'something else'}"
        )
    return key
