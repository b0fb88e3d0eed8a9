"""A script that connects without an endpoint and prints what happens: `python launch_programs.py NAME`."""

import multiprocessing
import os
import sys

import numpy as np
from torch import distributed

import client
from statsd_bn import Rows
from statsd_bn.errors import StatsdBNError
from support.output import print_line

ROW = Rows((1,), np.ones((1, 2, 3)))
DEADLINE = 30.0


def meet_twice() -> None:
    """Connect and leave, twice; then start a process group, which uses the same store."""
    for _ in range(2):
        with client.connect(round_timeout=DEADLINE) as connection:
            print_line("covers", client.SlavePipe(connection, "bn").run_slave(ROW).count, repr(connection))
    distributed.init_process_group("gloo")
    distributed.barrier()
    distributed.destroy_process_group()
    print_line("through")


def go_on_after_member_0() -> None:
    """Member 0 has less data than the others, and its script ends."""
    connection = client.connect(round_timeout=DEADLINE)
    client.SlavePipe(connection, "bn").run_slave(ROW)
    if connection.rank == 0:
        connection.pause(None)
        print_line("at the end")
    else:
        sys.stdin.readline()
        print_line("covers", client.SlavePipe(connection, "bn").run_slave(ROW).count)


def go_on_after_member_0_in_forked_children() -> None:
    """The same in forked children of multiprocessing, which end without `atexit` callbacks."""
    descriptor = os.dup(sys.stdin.fileno())

    def child() -> None:
        sys.stdin = os.fdopen(descriptor)
        go_on_after_member_0()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    sys.exit(process.exitcode)


def be_busy_when_member_0_ends() -> None:
    """Every member waits for a line between two rounds, so that member 0 and its server can end in between."""
    connection = client.connect(round_timeout=DEADLINE)
    print_line("covers", client.SlavePipe(connection, "bn").run_slave(ROW).count)
    sys.stdin.readline()
    client.SlavePipe(connection, "bn").run_slave(ROW)


if __name__ == "__main__":
    try:
        globals()[sys.argv[1]]()
    except StatsdBNError as error:
        print_line(type(error).__name__, error)
