"""What is packed or unpacked once and then kept: round keys, and sets of members.

A round's key comes with each member's contribution, and its members with each aggregate. Many layers have rounds at a
time.
"""

import struct
from functools import lru_cache
from itertools import chain
from typing import Any

from statsd_bn import limits
from statsd_bn.errors import ProtocolError
from statsd_bn.members import Members
from statsd_bn.round_key import RoundKey
from statsd_bn.wire.headers import KEY_FIELDS, MOST_KEY_BYTES, array, binary, pack, unpack

_KEPT_KEYS, _KEPT_MEMBERS = 4096, 64
_KEPT_MEMBERS_BYTES, _KEPT_RUNS = 1024, 256
_keys: dict[bytes, RoundKey] = {}
_packed: dict[RoundKey, bytes] = {}

# A run of members: its first number, and how many follow one another.
_RUN = struct.Struct("<HH")

# Every other member, each a run.
_MOST_MEMBERS_BYTES = _RUN.size * limits.MAX_MEMBERS // 2


def packed_key(key: RoundKey) -> bytes:
    """A round key as msgpack."""
    packed = _packed.get(key)
    if packed is None:
        packed = pack(key)
        keep_packed(key, packed)
    return packed


def keep_packed(key: RoundKey, packed: bytes) -> None:
    """Keep what `packed_key` returns for a key; whoever sends it will receive it."""
    _keep_key(packed, key)
    _packed[key] = packed


def unpacked_key(value: Any) -> RoundKey:
    """Round key that a field of a header holds, as msgpack."""
    packed = binary("round key", value, MOST_KEY_BYTES)
    return _keys.get(packed) or _keep_key(packed, _read_key(packed))


def packed_members(members: Members) -> bytes:
    """Members as runs of two numbers each."""
    if not members.runs:
        return b""
    return _packed_runs(members) if len(members.runs) <= _KEPT_RUNS else _packed_runs.__wrapped__(members)


def unpacked_members(value: Any) -> Members:
    """Members that a field of a header holds, as runs."""
    packed = binary("members", value, _MOST_MEMBERS_BYTES)
    # A set of thousands of runs takes a megabyte, and only a stranger sends one.
    read = _read_members if len(packed) <= _KEPT_MEMBERS_BYTES else _read_members.__wrapped__
    return read(packed)


def _keep_key(packed: bytes, key: RoundKey) -> RoundKey:
    if len(_keys) >= _KEPT_KEYS:
        _keys.clear()
        _packed.clear()
    _keys[packed] = key
    return key


def _read_key(packed: bytes) -> RoundKey:
    fields = unpack("round key", packed, KEY_FIELDS)
    if len(array("round key", fields)) != KEY_FIELDS:
        raise ProtocolError(f"round key: expected {KEY_FIELDS} fields, got {len(fields)}")
    return RoundKey(*fields)


@lru_cache(maxsize=_KEPT_MEMBERS)
def _packed_runs(members: Members) -> bytes:
    return struct.pack(f"<{2 * len(members.runs)}H", *chain.from_iterable(members.runs))


@lru_cache(maxsize=_KEPT_MEMBERS)
def _read_members(packed: bytes) -> Members:
    if len(packed) % _RUN.size:
        raise ProtocolError(f"members: expected {_RUN.size} bytes for each run, got {len(packed)}")
    return Members(tuple(_RUN.iter_unpack(packed)))
