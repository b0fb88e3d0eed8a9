"""Key files: `python -m server keygen DIR` generates them, and a server loads them.

`keygen` only adds files. A server reads its keys from such a folder, or for one job from standard input.
"""

import json
import os
import secrets
import stat
import sys
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import zmq
from zmq.utils import z85

from server.security.access import Principal
from statsd_bn import keys
from statsd_bn.errors import ConfigurationError
from statsd_bn.keys import ClientKeys, KeyPair, to_toml

PRIVATE_FILE = 0o600
PRIVATE_FOLDER = 0o700

SECRET_BYTES = KEY_BYTES = 32

STANDARD_INPUT = "-"  # in place of a folder: the parent process passes the keys, so no file contains them

SECRET_NOTE = "# This file proves an identity to the server: keep it private.\n"  # noqa: S105 - a comment in the file
PUBLIC_NOTE = "# A client's public key; the server admits the client while this file is here. SIGHUP reads it again.\n"


def generate(folder: str | Path, clients: Sequence[str] = (), jobs: Sequence[str] = (), tenant: str = "") -> list[Path]:
    """Generates a key pair for each client, and one for the server if it has none; returns the new files."""
    check_curve()
    folder = Path(folder)
    names = [keys.check_name(name) for name in dict.fromkeys(clients or (keys.DEFAULT_CLIENT,))]
    if bad := [pattern for pattern in jobs if not (pattern.isprintable() and pattern)]:
        raise ConfigurationError(f"jobs: expected patterns of printable letters, got {bad[0]!r:.80}")
    rights = f"{keys.JOBS} = {json.dumps(list(jobs or ('*',)), ensure_ascii=False)}\n"  # JSON that is also TOML
    rights += to_toml(tenant=keys.check_name(tenant)) if tenant else ""
    places = folder, folder / keys.PUBLIC_FOLDER, folder / keys.SECRET_FOLDER
    try:
        for place in places:
            _check_folder(place, "keys", may_be_shared=False)
        contents = _contents(folder, names, rights)
        if taken := [str(path) for path in contents if path.exists()]:
            text = f"keygen: expected no such files, and found {', '.join(taken)}; nothing was written"
            raise ConfigurationError(text)
        for place in places:
            place.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        for path, text in contents.items():
            _write_private(path, text)
    except OSError as error:
        raise ConfigurationError(f"keygen: cannot write {error.filename}: {error.strerror}") from error
    return list(contents)


def write_secret(file: str | Path) -> None:
    """Writes the secret of a job on several nodes, which clients read through STATSD_BN_SECRET_FILE."""
    path = Path(file)
    if path.exists():
        raise ConfigurationError(f"secret: expected no such file, and found {path}; nothing was written")
    try:
        # The folder may be writable for a group, as with a umask of 002: its members are trusted, and the file is new.
        _check_folder(path.parent, "secret", may_be_shared=True)
        _write_private(path, f"{secrets.token_hex(SECRET_BYTES)}\n")
    except OSError as error:
        raise ConfigurationError(f"secret: cannot write {path}: {error.strerror}") from error


def _check_folder(folder: Path, what: str, *, may_be_shared: bool) -> None:
    """Raises ConfigurationError if another user could add files to a folder, or replace them.

    A shared folder may be writable for a group, or sticky, such as /tmp. A missing folder will be created private, so
    only the folders above it count.
    """
    there = folder.absolute()
    while not os.path.lexists(there):
        there = there.parent
    may_be_shared |= there != folder.absolute()
    real = there.resolve(strict=True)
    for each in (real, *real.parents):
        found = each.stat()
        if found.st_uid not in {0, os.getuid()}:
            text = f"{what}: expected {each} to belong to this user (uid {os.getuid()}), got uid {found.st_uid}"
            raise ConfigurationError(f"{text}, who could replace the files there; give another folder")
        forbidden = stat.S_IWOTH if may_be_shared else stat.S_IWOTH | stat.S_IWGRP
        if found.st_mode & forbidden and not (may_be_shared and found.st_mode & stat.S_ISVTX):
            mode = f"{stat.S_IMODE(found.st_mode):04o}; chmod go-w {each}, or give another folder"
            text = f"{what}: expected only this user to be able to write to {each}, got mode {mode}"
            raise ConfigurationError(text)
        may_be_shared = True  # a group that may write to a folder above is trusted


def check_curve() -> None:
    """Raises ConfigurationError if this libzmq was built without CURVE."""
    if not zmq.has("curve"):
        raise ConfigurationError(f"curve: libzmq {zmq.zmq_version()} was built without it; install pyzmq from a wheel")


def _contents(folder: Path, names: Sequence[str], rights: str) -> dict[Path, str]:
    contents: dict[Path, str] = {}
    if (folder / keys.SERVER_SECRET).exists():
        server = keys.load_server(folder)
    else:
        server = _pair()
        secret = to_toml(public_key=server.public, secret_key=server.secret)
        contents[folder / keys.SERVER_SECRET] = SECRET_NOTE + secret
        contents[folder / keys.SERVER_PUBLIC] = to_toml(public_key=server.public)
    for name in names:
        pair = _pair()
        secret = to_toml(public_key=pair.public, secret_key=pair.secret, server_key=server.public)
        contents[folder / keys.SECRET_FOLDER / f"{name}{keys.SECRET_SUFFIX}"] = SECRET_NOTE + secret
        public = folder / keys.PUBLIC_FOLDER / f"{name}{keys.PUBLIC_SUFFIX}"
        contents[public] = PUBLIC_NOTE + to_toml(public_key=pair.public) + rights
    return contents


def _pair() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def _write_private(path: Path, text: str) -> None:
    # EXCL, because another process may have just created the file; the mode makes the file private from the start.
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE)
    with os.fdopen(opened, "w", encoding="utf-8") as file:
        file.write(text)


def load_server_keys(curve: str) -> tuple[KeyPair, list[Principal]]:
    """Returns the server's pair and the clients' public keys."""
    if curve != STANDARD_INPUT:
        return keys.load_server(curve), load_clients(curve)
    found = keys.parse_server(sys.stdin.read(keys.MAX_FILE_BYTES), "standard input")
    return found.pair, [Principal(found.client, found.client_key)]


def operator_pair(pair: KeyPair) -> KeyPair:
    """Returns the read-only pair of the operator, derived from the server's own."""
    check_curve()
    made = blake2b(b"operator", key=pair.secret.encode(), digest_size=KEY_BYTES, person=b"statsd_bn").digest()
    secret = z85.encode(made)
    return KeyPair(zmq.curve_public(secret).decode(), secret.decode())


def load_query_keys(curve: str) -> ClientKeys:
    """Returns the keys for status requests: the operator's if `curve` is the server's folder, else a client's."""
    if not os.access(Path(curve) / keys.SERVER_SECRET, os.F_OK):
        return keys.load_client(curve)
    pair = keys.load_server(curve)
    return ClientKeys(operator_pair(pair), pair.public)


def load_public(path: Path) -> Principal:
    """Returns the client of a public key file; the client has the name of the file."""
    entries = keys.parse(path, keys.read_file(path, "curve")[0])
    jobs = entries.get(keys.JOBS, ["*"])
    if not (isinstance(jobs, list) and jobs and all(isinstance(pattern, str) and pattern for pattern in jobs)):
        text = f'{path}: {keys.JOBS}: expected patterns such as ["digits", "team-a-*"], got {jobs!r:.80}'
        raise ConfigurationError(text)
    tenant = entries.get(keys.TENANT, "")
    if tenant and not (isinstance(tenant, str) and keys.CLIENT_NAME.fullmatch(tenant)):
        raise ConfigurationError(f'{path}: {keys.TENANT}: expected a name such as "team-a", got {tenant!r:.80}')
    return Principal(keys.check_name(path.stem), keys.key_in(path, entries, keys.PUBLIC), tuple(jobs), tenant)


def load_clients(folder: str | Path) -> list[Principal]:
    """Returns the clients of the public key files in a folder."""
    clients, problems = load_valid_clients(folder)
    if problems:
        raise problems[0]
    return clients


def load_valid_clients(folder: str | Path) -> tuple[list[Principal], list[ConfigurationError]]:
    """Returns the clients of the valid public key files in a folder, and the errors of the other files."""
    if folder == STANDARD_INPUT:
        raise ConfigurationError("curve: expected a folder to reload keys from, got standard input")
    valid: dict[str, Principal] = {}
    problems = []
    public_files = Path(folder) / keys.PUBLIC_FOLDER
    try:
        paths = sorted(public_files.iterdir())  # a glob treats an unreadable folder as empty
    except OSError as error:
        raise ConfigurationError(f"curve: cannot list {public_files}: {error.strerror}") from error
    for path in paths:
        if not path.name.endswith(keys.PUBLIC_SUFFIX):
            continue
        try:
            client = load_public(path)
        except ConfigurationError as error:
            if keys.is_out_of_descriptors(error):  # no fault of the file
                raise
            problems.append(error)
            continue
        if other := valid.get(client.key):
            problems.append(ConfigurationError(f"curve: {path}: expected a unique key, got the key of {other.name!r}"))
        else:
            valid[client.key] = client
    return list(valid.values()), problems
