"""Where the server's keys come from: a folder, as `keygen` makes it, or standard input, for the server of one job."""

import os
import sys
from hashlib import blake2b
from pathlib import Path

import zmq
from zmq.utils import z85

from server.secrets.keygen import check_curve
from statsd_bn import keys
from statsd_bn.errors import ConfigurationError
from statsd_bn.keys import ClientKeys, Pair, PublicKey

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
