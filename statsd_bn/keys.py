"""Key files: the keys of a server and of a client.

A key is a CURVE key of ZeroMQ, 32 bytes written as 40 letters of Z85. The files are TOML; docs/security.md describes
them. No error quotes a file's content, so that no secret reaches a log.
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

# Layout of the folder that `python -m server keygen` makes, see docs/security.md.
SERVER_PUBLIC = Path("server.key")
SERVER_SECRET = Path("server.key_secret")
PUBLIC_FOLDER = Path("clients")
SECRET_FOLDER = Path("secrets")
PUBLIC_SUFFIX, SECRET_SUFFIX = ".key", ".key_secret"  # after the client's name
DEFAULT_CLIENT = "client"

PUBLIC, SECRET, SERVER, JOBS, TENANT = "public-key", "secret-key", "server-key", "jobs", "tenant"
CLIENT, CLIENT_KEY = "client", "client-key"

MAX_FILE_BYTES = 65_536  # a key file has 300 bytes; the rest is for names of jobs

_Z85 = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")  # https://rfc.zeromq.org/spec/32
CLIENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # becomes a file name, and appears in logs


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A public key and its secret key."""

    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """A client's keys: its own pair, and the server's public key."""

    pair: KeyPair
    server: str


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """Keys of a server that serves one client, passed to the server's process without a file."""

    pair: KeyPair
    client: str
    client_key: str

    def text(self) -> str:
        """Returns the keys as text for `parse_server`."""
        pair = self.pair
        return to_toml(public_key=pair.public, secret_key=pair.secret, client=self.client, client_key=self.client_key)


def to_toml(**values: str) -> str:
    """Returns TOML text of names and values; the values must contain neither quotes nor backslashes."""
    return "".join(f'{name.replace("_", "-")} = "{value}"\n' for name, value in values.items())


def check_name(name: str) -> str:
    """Returns a client's name; raises ConfigurationError if it is not valid."""
    if not CLIENT_NAME.fullmatch(name):
        raise ConfigurationError(
            f"client: expected a name of 1 to 64 letters, digits and . _ -, which begins with a letter or digit, "
            f"got {name!r:.80}"
        )
    return name


def load_client(path: str | Path) -> ClientKeys:
    """Returns a client's keys from its file; from a folder of `keygen`, the keys of the client named "client"."""
    path = Path(path)
    if path.is_dir():
        path = path / SECRET_FOLDER / f"{DEFAULT_CLIENT}{SECRET_SUFFIX}"
    entries = parse(path, read_secret(path))
    return ClientKeys(_pair(path, entries), key_in(path, entries, SERVER))


def load_server(folder: str | Path) -> KeyPair:
    """Returns the server's keys from the folder that `python -m server keygen` made."""
    path = Path(folder) / SERVER_SECRET
    return _pair(path, parse(path, read_secret(path)))


def parse_server(text: str, source: str) -> ServerKeys:
    """Returns the keys in a text that `ServerKeys.text` made."""
    entries = parse(source, text)
    name = check_name(str(entries.get(CLIENT, "")))
    return ServerKeys(_pair(source, entries), name, key_in(source, entries, CLIENT_KEY))


def is_out_of_descriptors(error: ConfigurationError) -> bool:
    """Returns whether a file could not be read because the process, or the host, has no free file descriptor."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE)


def read_secret(path: str | Path, name: str = "curve") -> str:
    """Returns the text of a file that holds a secret; warns if others can read it."""
    text, mode = read_file(Path(path), name)
    if mode & 0o077:
        logger.warning("other users can read the secret key in %s; chmod 600", path)
    return text


def read_file(path: Path, name: str) -> tuple[str, int]:
    """Returns a file's text and mode; does not wait for a pipe or a device, nor read a huge file."""
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


def parse(source: Path | str, text: str) -> Mapping[str, Any]:
    """Returns the entries of a key file."""
    try:
        return tomllib.loads(text)
    except ValueError:
        # The parser's message may quote the file, so it is neither reported nor chained.
        raise _no_keys(source) from None


def _no_keys(source: Path | str) -> ConfigurationError:
    return ConfigurationError(f"curve: {source} is not a key file; make one with `python -m server keygen`")


def _pair(source: Path | str, entries: Mapping[str, Any]) -> KeyPair:
    return KeyPair(key_in(source, entries, PUBLIC), key_in(source, entries, SECRET))


def key_in(source: Path | str, entries: Mapping[str, Any], name: str) -> str:
    """Returns the key of this name among the entries of a key file."""
    key = entries.get(name)
    if not (isinstance(key, str) and _Z85.fullmatch(key)):
        raise ConfigurationError(
            f"curve: {source}: {name}: expected a key of 40 letters, "
            f"as `python -m server keygen` makes it, got {'none' if key is None else 'something else'}"
        )
    return key
