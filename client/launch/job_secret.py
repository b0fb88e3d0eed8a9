"""The secret of a job on several nodes. Each process derives the same keys from it, so no secret is sent.

A launcher passes it to all processes, in a file or in the environment. Standard input would not work: the processes of
a host share it, and the first reader would consume it.
"""

import logging
import secrets
from collections.abc import Mapping
from hashlib import blake2b

import zmq
from zmq.utils import z85

from statsd_bn import keys
from statsd_bn.errors import ConfigurationError
from statsd_bn.keys import ClientKeys, KeyPair, ServerKeys

logger = logging.getLogger("statsd_bn.client")

# 128 bits in hexadecimal digits.
MIN_LETTERS = 32

# A random secret of MIN_LETTERS has about 14 distinct letters; "changeme" four times has 7.
MIN_DISTINCT_LETTERS = 8

# 256 bits, for a generated secret.
SECRET_BYTES = 32

KEY_BYTES = 32
MEMBER = "member"

ADVICE = (
    "Give all processes the same secret, in a file that STATSD_BN_SECRET_FILE names (`python -m server secret FILE` "
    "makes one) or in STATSD_BN_SECRET; or start `python -m server --curve DIR` yourself, and give them its endpoint "
    "and keys. STATSD_BN_SECRET_IN_STORE=1 sends a secret through torch's rendezvous store, where any client of "
    "MASTER_ADDR:MASTER_PORT can read it"
)


def read(environ: Mapping[str, str]) -> str | None:
    """Returns the job's secret; None if rank 0 generates one and sends it through torch's store.

    A missing, ambiguous or weak secret is a ConfigurationError.
    """
    path, text = environ.get("STATSD_BN_SECRET_FILE", ""), environ.get("STATSD_BN_SECRET", "")
    in_store = environ.get("STATSD_BN_SECRET_IN_STORE", "") == "1"
    if (bool(path), bool(text), in_store).count(True) > 1:
        raise ConfigurationError(
            "expected one of STATSD_BN_SECRET_FILE, STATSD_BN_SECRET and STATSD_BN_SECRET_IN_STORE=1, got several"
        )
    if path:
        return _checked("STATSD_BN_SECRET_FILE", keys.read_secret(path, "STATSD_BN_SECRET_FILE"))
    if text:
        return _checked("STATSD_BN_SECRET", text)
    if not in_store:
        raise ConfigurationError(
            "endpoint: none given, and the processes may be on several nodes according to the launcher. If all are on "
            f"this host, set MASTER_ADDR=127.0.0.1, or LOCAL_WORLD_SIZE to their number. {ADVICE}"
        )
    logger.warning(
        "STATSD_BN_SECRET_IN_STORE=1: the job's secret is sent through torch's rendezvous store; any client of "
        "MASTER_ADDR:MASTER_PORT can read it, and then join, end and falsify the job"
    )
    return None


def generate() -> str:
    """Returns a new secret."""
    return secrets.token_hex(SECRET_BYTES)


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


def _checked(name: str, text: str) -> str:
    secret = text.strip()
    if len(secret) < MIN_LETTERS or len(set(secret)) < MIN_DISTINCT_LETTERS:
        raise ConfigurationError(
            f"{name}: expected at least {MIN_LETTERS} random letters, as `python -m server secret FILE` makes them, "
            f"got {len(secret)} letters, {len(set(secret))} different ones"
        )
    return secret
