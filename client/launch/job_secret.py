"""The secret of a job on several nodes. Each process derives the same keys from it, so no secret is sent.

A launcher passes it to all processes, in a file or in the environment. Standard input would not work: the processes of
a host share it, and the first reader would consume it.
"""

from collections.abc import Mapping
from hashlib import blake2b

import zmq
from zmq.utils import z85

from statsd_bn import keys
from statsd_bn.errors import ConfigurationError
from statsd_bn.keys import ClientKeys, KeyPair, ServerKeys

# 128 bits in hexadecimal digits. A random secret has about 14 distinct letters; "changeme" four times has 7.
MIN_LETTERS, MIN_DISTINCT_LETTERS = 32, 8

KEY_BYTES = 32
MEMBER = "member"


def read(environ: Mapping[str, str]) -> str:
    """Returns the job's secret; a missing, ambiguous or weak one is a ConfigurationError."""
    path, text = environ.get("STATSD_BN_SECRET_FILE", ""), environ.get("STATSD_BN_SECRET", "")
    if path and text:
        raise ConfigurationError("expected one of STATSD_BN_SECRET_FILE and STATSD_BN_SECRET, got both")
    if not (path or text):
        raise ConfigurationError(
            "endpoint: none given, and the processes may be on several nodes according to the launcher. If all are on "
            "this host, set MASTER_ADDR=127.0.0.1, or LOCAL_WORLD_SIZE to their number. Give all processes the same "
            "secret, in a file that STATSD_BN_SECRET_FILE names (`python -m server secret FILE` makes one) or in "
            "STATSD_BN_SECRET; or start `python -m server --curve DIR` yourself, and give them its endpoint and keys"
        )
    secret = (keys.read_secret(path, "STATSD_BN_SECRET_FILE") if path else text).strip()
    if len(secret) < MIN_LETTERS or len(set(secret)) < MIN_DISTINCT_LETTERS:
        raise ConfigurationError(
            f"{'STATSD_BN_SECRET_FILE' if path else 'STATSD_BN_SECRET'}: expected at least {MIN_LETTERS} random "
            f"letters, as `python -m server secret FILE` makes them, got {len(secret)} letters, {len(set(secret))} "
            "different ones"
        )
    return secret


def server_keys(secret: str, job: str) -> ServerKeys:
    """Returns the keys of a job's server, which admits only the members of the job."""
    return ServerKeys(_pair(secret, job, "server"), MEMBER, _pair(secret, job, MEMBER).public)


def member_keys(secret: str, job: str) -> ClientKeys:
    """Returns the keys that all members of a job share."""
    return ClientKeys(_pair(secret, job, MEMBER), _pair(secret, job, "server").public)


def _pair(secret: str, job: str, label: str) -> KeyPair:
    if not zmq.has("curve"):
        raise ConfigurationError(f"curve: libzmq {zmq.zmq_version()} was built without it; install pyzmq from a wheel")
    key = blake2b(secret.encode()).digest()
    digest = blake2b(f"{label}\0{job}".encode(), key=key, digest_size=KEY_BYTES, person=b"statsd_bn").digest()
    private = z85.encode(digest)
    return KeyPair(zmq.curve_public(private).decode(), private.decode())
