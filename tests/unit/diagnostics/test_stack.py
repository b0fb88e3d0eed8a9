"""Stack reports of a process: names, files and lines of its threads only."""

import sys
import threading

from client.diagnostics import sampler
from client.diagnostics.sampler import ThreadSampler
from statsd_bn import limits
from support.foreign_code import run_as


def test_a_file_is_named_from_its_package_on_and_a_script_by_its_name():
    assert sampler.short_path("/home/me/env/lib/python3.11/site-packages/torch/nn/a.py") == "torch/nn/a.py"
    assert sampler.short_path(threading.__file__) == "threading.py"
    assert sampler.short_path("/home/me/secret project/train.py") == "train.py"


def test_a_thread_in_a_library_is_shown_with_the_calling_line_of_the_script():
    stacks: list[str] = []
    here = {"here": lambda: stacks.append(sampler.format_stack(sys._getframe(1)))}
    library = run_as("def forward(x):\n    here()", "/x/site-packages/torch/nn/a.py", "torch.nn.a", **here)
    script = "\n\ndef main(): forward(1)\nmain()"
    run_as(script, "/home/me/train.py", "__main__", forward=library["forward"])
    assert stacks == ["torch/nn/a.py:2 forward, called from train.py:3 main"]


def test_only_names_files_and_lines_are_reported():
    def load(password):
        assert password
        return sampler.format_stack(sys._getframe())

    stack = load("hunter2")
    assert "hunter2" not in stack
    assert "password" not in stack
    assert stack.endswith(" load")


def test_a_stack_is_bounded_and_printable():
    name, found, odd = "漢" * 5000, [], "漢\n\x1b" * 2000
    here = {"here": lambda: found.append(sampler.format_stack(sys._getframe(1)))}
    library = run_as(f"def {name}(): here()", f"/x/site-packages/{odd}.py", "m", **here)
    run_as(f"def {name}2(): f()\n{name}2()", f"/x/{odd}.py", "__main__", f=library[name])
    (stack,) = found
    assert stack.isprintable()
    assert len(stack.encode()) <= limits.MAX_STACK_BYTES


def test_the_main_threads_frame_is_found_from_another_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(sampler.format_stack(sampler.main_frame())))
    thread.start()
    thread.join()
    assert "test_stack.py" in found[0]


def test_a_thread_in_a_call_of_ours_is_known_though_it_waits_in_a_library():
    found = []
    file, module = "/x/site-packages/zmq/sugar/poll.py", "zmq.sugar.poll"
    library = run_as("def poll(): here()", file, module, here=lambda: found.append(sys._getframe(1)))
    run_as("poll()", "/x/client/session/channel_pool.py", "client.session.channel_pool", poll=library["poll"])
    assert sampler.is_in_call(found[0])
    assert not sampler.is_in_call(sys._getframe())


def test_without_permission_no_stack_is_reported():
    assert ThreadSampler(reports_stacks=True, rank=0).sample().stack
    assert not ThreadSampler(reports_stacks=False, rank=0).sample().stack
