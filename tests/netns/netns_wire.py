"""A network between namespaces with TUN devices: this process forwards packets between real TCP stacks."""

import fcntl
import os
import selectors
import struct
import threading
from collections.abc import Iterable
from typing import Self

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
MAX_PACKET = 65536

# The receiver's address in an IPv4 header.
TO = slice(16, 20)


def open_tun(name: str) -> int:
    """Makes a TUN device in the calling thread's network namespace; returns the descriptor that carries its packets."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return device


class Wire:
    """Carries packets between the hosts; a context manager."""

    def __init__(self, hosts: dict[bytes, int]) -> None:
        self.carried = self.dropped = 0
        self._hosts = hosts
        self._cut: frozenset[tuple[bytes, bytes]] = frozenset()
        self._stopping = False
        self._selector = selectors.DefaultSelector()
        for address, device in hosts.items():
            self._selector.register(device, selectors.EVENT_READ, address)
        self._thread = threading.Thread(target=self._carry, name="wire", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._thread.join()
        self._selector.close()

    def cut(self, ways: Iterable[tuple[bytes, bytes]]) -> None:
        """Drops packets of these (sender, receiver) pairs from now on, and forwards all others."""
        self._cut = frozenset(ways)

    def _carry(self) -> None:
        while not self._stopping:
            # With a timeout, to check `_stopping`.
            for key, _ in self._selector.select(0.05):
                self._take(key.fd, key.data)

    def _take(self, device: int, sender: bytes) -> None:
        try:
            packet = os.read(device, MAX_PACKET)
            receiver = packet[TO]
            if receiver not in self._hosts:
                return  # such as the multicast of each interface
            if (sender, receiver) not in self._cut:
                os.write(self._hosts[receiver], packet)
                self.carried += 1
                return
        except BlockingIOError:
            pass
        self.dropped += 1
