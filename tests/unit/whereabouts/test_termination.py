"""A signal to end, while the main thread is in a round, waits for the news of who was lost; at other times it does not.

Each test is a program of its own: a signal is a matter of the process.
"""

import signal
import subprocess
import sys

import pytest

HEAD = """
import support.without_torch
import os, signal, threading, time
from statsd_bn.errors import ReplicaLost
from client.whereabouts.broken_job import BrokenJob
from client.whereabouts.termination import Termination
job = BrokenJob(None, "rank 0", None)
termination = Termination(job, float({seconds}))
def term():
    os.kill(os.getpid(), signal.SIGTERM)
def news():
    job.take(ReplicaLost("rank 1 was lost", cause="boom"))
def wait():
    # As a channel does it: the signal may come in another thread, and then no long sleep would end.
    while True:
        time.sleep(0.05)
def term_and_news():
    term()
    threading.Timer(0.1, news).start()
"""

IN_A_ROUND = """
assert termination.begin()
threading.Timer(0.1, term_and_news).start()
wait()
"""


def run(code: str, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
    code = HEAD.format(seconds=seconds) + code
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=False)


def test_in_a_round_the_reason_is_said_and_the_process_ends_by_the_signal():
    done = run(IN_A_ROUND)
    assert done.returncode == -signal.SIGTERM
    assert done.stderr == "told to end by SIGTERM: rank 1 was lost\n"


def test_without_news_it_ends_by_the_signal_and_says_nothing():
    done = run(IN_A_ROUND.replace("term_and_news", "term"), seconds=0.2)
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "")


def test_the_scripts_own_handler_is_called():
    own = "signal.signal(signal.SIGTERM, lambda number, frame: (print('own', number, flush=True), os._exit(3)))"
    done = run(own + IN_A_ROUND)
    assert (done.returncode, done.stdout) == (3, f"own {int(signal.SIGTERM)}\n")
    assert "rank 1 was lost" in done.stderr


def test_who_sends_it_twice_does_not_wait():
    twice = "\nthreading.Timer(0.4, term).start()"
    assert run(twice + IN_A_ROUND.replace("term_and_news", "term")).returncode == -signal.SIGTERM


@pytest.mark.parametrize("before", ["signal.SIG_DFL", "signal.SIG_IGN", "wait"])
def test_after_a_round_and_in_one_within_it_all_is_as_before(before):
    code = f"""
signal.signal(signal.SIGTERM, {before})
if termination.begin():
    assert not termination.begin()
    termination.end()
assert signal.getsignal(signal.SIGTERM) == {before}
"""
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_another_thread_holds_nothing():
    code = """
found = []
thread = threading.Thread(target=lambda: found.append(termination.begin()))
thread.start()
thread.join()
assert found == [False]
"""
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_a_handler_that_the_script_sets_in_its_own_handler_stays():
    code = """
def own(number, frame):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGTERM, own)
termination.begin()
news()
term()
termination.end()
assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
"""
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_a_handler_of_c_stays_and_is_called():
    """As C++ libraries set them, which Python does not know of; it dumps the stacks, and the process lives."""
    own = "import faulthandler; faulthandler.register(signal.SIGTERM, chain=False)\n"
    rounds = "assert termination.begin(); termination.end(); term(); print('alive')"
    done = run(own + rounds)
    assert (done.returncode, done.stdout) == (0, "alive\n")
    assert "most recent call first" in done.stderr


def test_calls_that_went_on_after_the_signal_do_so_again():
    """asyncio asks for that, for instance."""
    own = "signal.signal(signal.SIGTERM, lambda *_: None); signal.siginterrupt(signal.SIGTERM, False)\n"
    ask = """
def goes_on():
    import ctypes
    read, write = os.pipe()
    threading.Timer(0.2, term).start()
    threading.Timer(0.6, lambda: os.write(write, b"x")).start()
    buffer = ctypes.create_string_buffer(1)
    return ctypes.CDLL(None).read(read, buffer, 1)
"""
    done = run(own + ask + "assert termination.begin(); termination.end(); print(goes_on())")
    assert done.stdout == "1\n", done


def test_an_interrupt_while_a_round_begins_leaves_all_as_before():
    """Ctrl-C may come when the handler is set, and `begin` has not returned."""
    code = """
from client.whereabouts import termination as module
set_handler = module.set_handler
def interrupted(number, handler):
    set_handler(number, handler)
    module.set_handler = set_handler
    raise KeyboardInterrupt
module.set_handler = interrupted
try:
    try:
        termination.begin("outer")
    finally:
        termination.end("outer")
except KeyboardInterrupt:
    print("interrupted")
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
assert termination.begin("outer")
assert not termination.begin("inner")
termination.end("inner")
assert signal.getsignal(signal.SIGTERM) is termination._handler
termination.end("outer")
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
"""
    done = run(code)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr
