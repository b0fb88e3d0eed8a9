"""Received: what became of a frame, for whoever holds the sockets."""

from server.rounds.rounds import Reply


class Received:
    """What became of a frame.

    Attributes:
        replies: the frames to send.
        session: the registered session that sent it; b"" if none did, or if it has just left.
        is_refused: whether it was unsound, or refused in a group's name, or named a session that is not registered.
        is_unsound: whether it was no message of the protocol.
    """

    # One is made for each frame, in a third of the time that a frozen dataclass takes.
    __slots__ = ("is_refused", "is_unsound", "replies", "session")

    def __init__(
        self, replies: list[Reply], session: bytes = b"", is_refused: bool = False, is_unsound: bool = False
    ) -> None:
        self.replies = replies
        self.session = session
        self.is_refused = is_refused
        self.is_unsound = is_unsound
