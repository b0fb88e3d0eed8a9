"""`python -m server` on a Unix socket in a folder that only this user can enter."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.launched import PATIENT, WAIT_SECONDS


@contextmanager
def private_server(**environ: str) -> Iterator[str]:
    """Runs it as long as the block, and yields its endpoint; on a busy machine a silent rank is not dead.

    Args:
        environ: variables of its own, such as STATSD_BN_SILENCE_SECONDS.
    """
    # A socket's path has 107 bytes at most, which pytest's folders may exceed.
    with tempfile.TemporaryDirectory(prefix="bn-") as folder:
        command = [sys.executable, "-m", "server", "--bind", f"ipc://{Path(folder) / 'server'}"]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, **PATIENT, **environ}
        ) as process:
            try:
                line = process.stdout.readline()
                assert line.startswith("listening on "), line
                yield line.split()[-1]
            finally:
                process.send_signal(signal.SIGTERM)
                try:
                    code = process.wait(WAIT_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    raise
            assert code == 0
