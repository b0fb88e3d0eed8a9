"""All limits of the protocol, with their reasons.

Both sides check received values against these before they use them. A client also checks before it sends: a server
closes the connection of a client that sends too large a frame, without a message.
"""

# A session or server id. With 8 random bytes a collision among a million sessions has a probability of 1 in 30 million.
TOKEN_BYTES = 8

# Texts. The longest module paths in use reach 120 bytes.
MAX_NAME_BYTES = 256  # short enough for every error
MAX_PHASE_BYTES = 32  # "forward", "backward", "second backward" and their numbered repetitions
MAX_TEXT_BYTES = 4096  # an error's message, or a cause with the end of a traceback
MAX_STACK_BYTES = 1024  # the stack of a thread: a few frames, each a shortened path, a line and a function

# Steps, calls, epochs and attempts. A round per millisecond exhausts 32 bits in 50 days, hence 48.
MAX_COUNTER = 2**48 - 1
MAX_COUNT = 2**53  # float64 represents integers exactly up to here; a larger count could not divide a sum exactly

# The widest batch norms in use have 2 to 8 thousand channels; ZeroMQ transfers 64 thousand in under a millisecond.
MAX_CHANNELS = 65_536
MAX_VECTORS = 8  # forward and backward need 2; second derivatives a few more
MAX_REPLICAS = 64  # in one process: the devices of one host (16), and virtual replicas
MAX_MEMBERS = 16_384  # of one group

# Liveness. On a busy machine a process misses a heartbeat now and then, so HEARTBEAT_MISSES in a row are allowed, and
# half a second of delay. A member that is silent for longer is lost.
HEARTBEAT_SECONDS = 1.0
HEARTBEAT_MISSES = 3
SILENCE_SECONDS = HEARTBEAT_MISSES * HEARTBEAT_SECONDS + 0.5
MAX_DEADLINE = 86_400.0  # seconds of a round: one day

# The header of a frame; the largest is that of a busy server's status report. Requests have a lower limit, because any
# client may send them unasked. The longest request, a Register whose `known` has every second of 16,384 members, has
# a header of 33 KB.
MAX_HEADER_BYTES = 1_048_576
MAX_REQUEST_HEADER_BYTES = 65_536

MAX_FRAME_BYTES = MAX_HEADER_BYTES + 8 * MAX_REPLICAS * 2 * 16_384  # MAX_REPLICAS rows of 2 vectors of 16,384 channels

# Levels of nesting in an error's fields, a report or an exchanged state: 8 in practice; hundreds overflow the stack.
MAX_DEPTH = 32

# Layers in one SkewStats message; a larger model needs several. MAX_SKEW_BYTES bounds the names and line feeds.
MAX_SKEW_LAYERS = 64
MAX_SKEW_BYTES = MAX_SKEW_LAYERS * (MAX_NAME_BYTES + 1)

BUCKETS = 24  # of a histogram: upper bounds double from 20 us to 84 s; the last bucket counts longer durations

# Layers in one Figures message: as many as the server stores for a group. MAX_FIGURES_BYTES bounds names and values: a
# server with keys encrypts 1 MiB in 3 ms, and one layer's figures of MAX_MEMBERS members fit.
MAX_FIGURES_LAYERS = 1024
MAX_FIGURES_BYTES = 2**20

MAX_GROUPS = 1024  # on one server; a group of four members at 256 channels takes 0.2 MB
MAX_OPEN_ROUNDS = 256  # of one group; a member with one thread has one open round, overlapping models have a few

# Cached results of one group's latest rounds, for repeated contributions. Two members may be one round apart, and each
# further thread of a member adds one round.
CACHED_ROUNDS = 8
