"""Message <-> bytes: one frame per message, as docs/protocol.md has it.

    offset  size   content
    0       3      magic, b"SBN"
    3       1      protocol version
    4       4      H, the header's length, unsigned little-endian
    8       H      header: a msgpack array [type, field, field, ...]; of Contribution and Aggregate fixed fields
    8+H     0-7    zero bytes up to a multiple of 8
    ...     8·n    values: little-endian float64, in C order

One frame rather than three, because each ZeroMQ frame costs a system call's worth of time; raw numbers rather than
msgpack floats, because they become an array without a loop or a copy.

    frame = encode(Heartbeat(session))
    message = decode(frame)

`frame` has the layout, and packs msgpack and unpacks it within bounds; `round_frames` has the two messages that each
round sends, and `codec` all others.
"""

from statsd_bn.wire.codec import decode, decode_request, encode
from statsd_bn.wire.frame import MAGIC, PROTOCOL_VERSION

__all__ = ["MAGIC", "PROTOCOL_VERSION", "decode", "decode_request", "encode"]
