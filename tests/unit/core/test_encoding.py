"""Encoding by several threads at a time, also where msgpack has no extension in C."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys, threading
from statsd_bn.messages import Heartbeat
from statsd_bn.wire import decode, encode

sys.setswitchinterval(1e-5)
mixed = []

def say(session):
    try:
        for step in range(2000):
            read = decode(encode(Heartbeat(session, step)))
            assert (read.session, read.step) == (session, step)
    except Exception as error:
        mixed.append(error)

threads = [threading.Thread(target=say, args=(b"session%d" % number,)) for number in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.exit(len(mixed))
"""


@pytest.mark.parametrize("pure", ["", "1"])
def test_threads_do_not_write_into_one_anothers_frames(pure):
    """Else one would speak in another one's name."""
    environment = {**os.environ, "MSGPACK_PUREPYTHON": pure}
    assert subprocess.run([sys.executable, "-c", SCRIPT], env=environment, timeout=60, check=False).returncode == 0
