"""A replica's first process: determines its rank, then executes `examples/train_digits.py`.

Compose starts N equal containers without numbers, and its versions 1 and 2 name them differently. So the replicas of a
host take ranks in order of arrival, by files in a shared folder. If RANK is set, as in the Kubernetes manifests, that
is the rank.
"""

import os
import socket
import sys
from pathlib import Path

MEETING = Path("/meeting")
TRAINING = Path(__file__).parents[1] / "examples" / "train_digits.py"


def main() -> None:
    """Replaces this process by the training, which gets the command line."""
    arguments = sys.argv[1:]
    if "RANK" not in os.environ:
        world_size = int(os.environ["WORLD_SIZE"])
        rank = claim(MEETING, world_size, socket.gethostname())
        print(f"rank {rank} of {world_size}", flush=True)
        # All replicas that share the folder are on one host.
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        arguments += ["--init-method", f"file://{MEETING}/gloo"]
    os.execv(sys.executable, [sys.executable, str(TRAINING), *arguments])  # noqa: S606 - this project's own program


def claim(folder: Path, world_size: int, name: str) -> int:
    """Returns the first free rank, or the one that `name` took before it was restarted.

    Raises:
        SystemExit: all are taken.
    """
    for rank in range(world_size):
        place = folder / f"rank-{rank}"
        try:
            with place.open("x") as file:
                file.write(name)
        except FileExistsError:
            if place.read_text() != name:
                continue
        return rank
    raise SystemExit(f"replica: expected one of {world_size} ranks to be free in {folder}, but all are taken")


if __name__ == "__main__":
    main()
