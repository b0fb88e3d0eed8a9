"""Hosts that are pretended: threads or processes that cannot reach one another's memory, as on several hosts."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from client.connection.connection import Connection
from client.shared_memory import passing
from support.memory_members import MemoryMaster, in_threads


def run_on_hosts(
    monkeypatch: pytest.MonkeyPatch,
    hosts: list[int],
    program: Callable[[Connection], Any],
    master: MemoryMaster | None = None,
    lane: str = "relay",
) -> list[Any]:
    """Runs a member in a thread for each entry, which says on which host; returns what the programs return."""
    master, here = master or MemoryMaster(), threading.local()
    monkeypatch.setattr(passing, "_address", lambda name: f"\0host {here.number} {name}")

    def member(number: int) -> Any:
        here.number = hosts[number]
        with master.connect(number, len(hosts), lane=lane) as connection:
            return program(connection)

    return in_threads([lambda number=number: member(number) for number in range(len(hosts))])


def pretend_to_be_on(host: int) -> None:
    """Lets this process reach the memory of those that pretend to be on the same host, and of nobody else."""
    passing._address = lambda name: f"\0host {host} {name}"
