"""LastSettled: what a process has said last of a round that is over in memory, and has to say again."""


class LastSettled:
    """What this process has said last of a round that is over in memory, in any group; one for all its sessions.

    It is said again ahead of the next contribution. What was lost with a connection would else leave a member at the
    server that seems to wait there still for this one, while this one waits for it elsewhere.

    Attributes:
        frame: the RoundDone; empty once the server has answered what came behind it.
    """

    def __init__(self) -> None:
        self.frame = b""

    def was_heard(self, frame: bytes) -> None:
        """The server has answered what came behind a frame; meanwhile another thread may have said something else."""
        if self.frame == frame:
            self.frame = b""
