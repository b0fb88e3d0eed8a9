"""Every limit of the protocol, with its reason.

Both sides check against these before they use what came; a client checks before it sends, because a server
drops the connection of whoever sends a frame that is too large, without a word.
"""

# A session or server id: 8 random bytes make a clash among a million lives of members a 1 in 30 million event.
TOKEN_BYTES = 8

# Room for the longest module path people write (some reach 120), small enough to keep in every error.
MAX_NAME_BYTES = 256

# "forward", "backward", "second backward" and their numbered repetitions.
MAX_PHASE_BYTES = 32

# An error's message or a cause with the heart of a traceback.
MAX_TEXT_BYTES = 4096

# Where a thread is: a few frames, each a shortened path, a line and a function.
MAX_STACK_BYTES = 1024

# Steps, calls, epochs and attempts: a round a millisecond fills 32 bits in 50 days, so 48.
MAX_COUNTER = 2**48 - 1

# float64 holds integers exactly up to here; a count beyond it could not divide a sum exactly.
MAX_COUNT = 2**53

# The widest batch-norm in use has 2-8 thousand channels; ZeroMQ moves 64 thousand in under a millisecond.
MAX_CHANNELS = 65_536

# Forward and backward need 2; gradients of gradients need a few more.
MAX_VECTORS = 8

# Replicas in one process: the devices of one box (16) with room for virtual ones.
MAX_REPLICAS = 64

# Members of one group.
MAX_MEMBERS = 16_384

# One day: longer is not a deadline.
MAX_DEADLINE = 86_400.0

# A member that has said nothing for this long says that it is alive. Each costs 30 bytes.
HEARTBEAT_SECONDS = 1.0

# Heartbeats that may be missing: a busy machine makes a process miss one now and then.
HEARTBEAT_MISSES = 3

# A member that is silent for this long is lost. Half a second more than the misses, so that the last heartbeat that
# counts need not come to the millisecond.
SILENCE_SECONDS = HEARTBEAT_MISSES * HEARTBEAT_SECONDS + 0.5

# The msgpack header of a frame. A status report of a busy server is the largest.
MAX_HEADER_BYTES = 1_048_576

# The header of a frame to the server, most of which nobody has asked for. A Register that names 16,384 members of which
# no two are neighbours has 33 KB.
MAX_REQUEST_HEADER_BYTES = 65_536

# A whole frame: a member of 64 replicas at 16,384 channels and two vectors.
MAX_FRAME_BYTES = MAX_HEADER_BYTES + 8 * MAX_REPLICAS * 2 * 16_384

# What nests: an error's fields, a status report, a state that members give each other. Real ones reach 8 levels; each
# costs whoever reads it a call, and a few hundred more than a process has stack for.
MAX_DEPTH = 32

# Layers in one SkewStats, which comes once a second; a model with more is told of in turns.
MAX_SKEW_LAYERS = 64

# The names of these layers, each with the end of its line.
MAX_SKEW_BYTES = MAX_SKEW_LAYERS * (MAX_NAME_BYTES + 1)

# Buckets of a histogram, of which each is twice as wide as the one before: from 20 us up to 84 s, and one beyond.
BUCKETS = 24

# Layers in one Figures: as many as the server keeps for a group.
MAX_FIGURES_LAYERS = 1024

# The names and the values of one Figures. So it takes a server with keys some 3 ms to encrypt, and one layer of
# MAX_MEMBERS has room.
MAX_FIGURES_BYTES = 2**20

# Groups on one server. One of four members at 256 channels holds about 0.2 MB, so all of them stay under 200 MB.
MAX_GROUPS = 1024

# Open rounds of one group. A member with one thread has one; overlapping models have a few.
MAX_OPEN_ROUNDS = 256

# Finished rounds of one group whose result is kept for a repeated question. Members in step can be one round
# apart, and each thread of a member adds one.
KEPT_ROUNDS = 8
