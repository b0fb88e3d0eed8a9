"""A network of our own between network namespaces: each has a TUN device, and this process carries the packets.

So delay, loss, doubling, reordering and partitions need nothing of the kernel but TUN; `tc netem` is a module that many
machines lack. The kernels' TCP on both ends is real, and recovers as it does on a real network.
"""

import fcntl
import heapq
import itertools
import os
import random
import selectors
import struct
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
MAX_PACKET = 65536

# Where IPv4 says to whom a packet goes.
TO = slice(16, 20)


@dataclass(frozen=True)
class Weather:
    """What befalls each packet; a share is from 0 to 1.

    Attributes:
        delay: of every packet, in seconds.
        jitter: how much longer or shorter the delay may be, in seconds.
        lost: the share that never arrives.
        doubled: the share that arrives twice.
        held: the share that is held back for `HELD_SECONDS`, so that later ones overtake it.
    """

    delay: float = 0.0
    jitter: float = 0.0
    lost: float = 0.0
    doubled: float = 0.0
    held: float = 0.0


HELD_SECONDS = 0.02


def open_tun(name: str) -> int:
    """Makes a TUN device in the calling thread's network namespace and returns what carries its packets."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return device


class Wire:
    """Carries packets between the hosts; a context manager.

    Args:
        hosts: the TUN device of each IPv4 address, in its four bytes.
        seed: of all chance.
    """

    def __init__(self, hosts: dict[bytes, int], seed: int) -> None:
        self.weather = Weather()
        self.carried = self.dropped = 0
        self._hosts = hosts
        self._chance = random.Random(seed)
        self._cut: frozenset[tuple[bytes, bytes]] = frozenset()
        self._under_way: list[tuple[float, int, bytes, bytes]] = []
        self._number = itertools.count()
        self._stopping = False
        self._selector = selectors.DefaultSelector()
        for address, device in hosts.items():
            self._selector.register(device, selectors.EVENT_READ, address)
        self._thread = threading.Thread(target=self._carry, name="wire", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True
        self._thread.join()
        self._selector.close()

    def cut(self, ways: Iterable[tuple[bytes, bytes]]) -> None:
        """From now on nothing goes these ways, each from one address to another; all others are open."""
        self._cut = frozenset(ways)

    def _carry(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select(self._pause()):
                self._take(key.fd, key.data)
            self._deliver(time.monotonic())

    def _pause(self) -> float:
        """Seconds until the next packet is due, and never so long that a wish to stop goes unheard."""
        due = self._under_way[0][0] - time.monotonic() if self._under_way else 0.05
        return min(max(due, 0.0), 0.05)

    def _take(self, device: int, sender: bytes) -> None:
        try:
            packet = os.read(device, MAX_PACKET)
        except BlockingIOError:
            return
        receiver = packet[TO]
        if receiver not in self._hosts:
            return  # such as multicast, which every interface sends of itself
        weather = self.weather
        if (sender, receiver) in self._cut or self._chance.random() < weather.lost:
            self.dropped += 1
            return
        self._send(packet, receiver)
        if self._chance.random() < weather.doubled:
            self._send(packet, receiver)

    def _send(self, packet: bytes, receiver: bytes) -> None:
        weather = self.weather
        delay = weather.delay + self._chance.uniform(-weather.jitter, weather.jitter)
        if self._chance.random() < weather.held:
            delay += HELD_SECONDS
        heapq.heappush(self._under_way, (time.monotonic() + delay, next(self._number), receiver, packet))

    def _deliver(self, now: float) -> None:
        while self._under_way and self._under_way[0][0] <= now:
            _, _, receiver, packet = heapq.heappop(self._under_way)
            try:
                os.write(self._hosts[receiver], packet)
                self.carried += 1
            except BlockingIOError:
                self.dropped += 1
