"""Starter: test processes come from one that has loaded torch, its compiler and ours, so in milliseconds, not seconds.

Nothing is inherited from whoever starts them but what the environment was when the first one began. Their random
numbers begin alike.
"""

import multiprocessing

STARTER = multiprocessing.get_context("forkserver")

# With the first optimizer of a process torch loads the compiler, and so does `client.connect`; its back half it loads
# with the first call that is compiled, which takes more than a second.
STARTER.set_forkserver_preload(["client", "torch._dynamo", "torch._inductor.compile_fx", "conftest"])

WAIT_SECONDS = 100.0


def warm_up() -> None:
    """Starts what starts the processes, so that nobody's time begins with that; it lives as long as this process."""
    process = STARTER.Process(target=int)
    process.start()
    process.join(WAIT_SECONDS)
