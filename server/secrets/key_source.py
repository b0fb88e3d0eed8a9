"""Where the server's keys come from: a folder, as `keygen` makes it, or standard input, for the server of one job."""

import sys

from statsd_bn import keys
from statsd_bn.errors import ConfigurationError
from statsd_bn.keys import Pair, PublicKey

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


def load_again(curve: str) -> tuple[list[PublicKey], list[ConfigurationError]]:
    """Returns whom the server lets in from now on, and what is wrong with the files that are not sound.

    Raises:
        ConfigurationError: nothing can be said of any.
    """
    if curve == STANDARD_INPUT:
        raise ConfigurationError("curve: expected a folder, to read keys again, got standard input")
    return keys.load_sound_clients(curve)
