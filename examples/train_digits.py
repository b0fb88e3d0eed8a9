"""Trains on the digits as one of several processes: a script to start from.

torchrun --nproc-per-node 4 examples/train_digits.py

Two lines make its batch norm synchronised: `client.convert_model`, and `client.connect`, which takes RANK and
WORLD_SIZE from the environment and has rank 0 start a server. A server that runs already is used where
STATSD_BN_ENDPOINT says where it listens. Gradients are the business of DistributedDataParallel, as ever.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import client
import digits
from training import snapshot, train

# By default torch waits half an hour.
DEADLINE = 60.0

TELL_EVERY = 10


def main() -> None:
    """Trains, and on rank 0 says how it goes and saves what came of it."""
    options = arguments()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    distributed.init_process_group(
        "gloo",
        store=store(options, rank, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=options.deadline),
    )
    network = digits.network().to(device(options))
    states = {}
    if options.synchronise:
        client.convert_model(network)
    # Before this process connects, since torch imports its compiler here. Where a machine has little time for that, it
    # holds Python's global lock for so long that the server takes the process for lost.
    model = parallel(network, options)
    connecting = client.connect(round_timeout=options.deadline) if options.synchronise else nullcontext()
    with connecting as connection, naming_the_lost():
        for step, loss in train(model, options.steps, rank, world_size):
            if rank == 0 and step % TELL_EVERY == 0:
                print(f"step {step} of {options.steps}: loss {loss:.3f}", flush=True)
            if step in {*options.keep, options.steps}:
                states[step] = snapshot(network)
    if rank == 0 and options.save:
        torch.save({"states": states, **exchanges(connection)}, options.save)
    # Nobody tears the group down while another is still in its last exchange, nor while a model holds it: freeing the
    # model afterwards may wait for a gloo thread that waits for the interpreter.
    distributed.barrier()
    del model
    distributed.destroy_process_group()


def store(options: argparse.Namespace, rank: int, world_size: int) -> distributed.Store:
    """Returns where the processes meet; those that `torchrun --max-restarts` has started anew, in a place of their own.

    Torchrun keeps one store for all of them, where gloo would find the addresses of processes that are no more
    (pytorch#135712). It counts restarts on each node by itself, so this is for one node; for several, start torchrun
    with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
    """
    found, _, _ = next(distributed.rendezvous(options.init_method, rank, world_size))
    is_one_node = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_one_node else "0"
    return distributed.PrefixStore(f"start {restarts}", found)


def device(options: argparse.Namespace) -> torch.device:
    """Returns where to train: of several CUDA devices of a host each process has its own, as long as they suffice."""
    if options.device != "cuda":
        return torch.device(options.device)
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def parallel(network: nn.Module, options: argparse.Namespace) -> nn.Module:
    """Returns what spreads the batch over this process's devices, or averages the gradients with other processes."""
    return client.DataParallelWithCallback(network) if options.data_parallel else DistributedDataParallel(network)


@contextmanager
def naming_the_lost() -> Iterator[None]:
    """Says which process is gone where gloo is the first to notice that one is: gloo knows only an address.

    Raises:
        ReplicaLost: with the name, from the server.
    """
    try:
        yield
    except RuntimeError as error:
        if "gloo" in str(error) and client.current_connection():
            client.SynchronizedBatchNorm1d(1)(torch.zeros(2, 1))
        raise


def exchanges(connection: client.Connection | None) -> dict[str, float]:
    """Returns how often and how quickly the synchronised layers exchanged their statistics, if they did."""
    if connection is None:
        return {}
    return {"rounds": connection.rounds, "median_round_trip": connection.median_round_trip}


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Trains on the digits as process RANK of WORLD_SIZE.")
    parser.add_argument("--steps", type=int, default=900, help="batches to train with (default: 900)")
    parser.add_argument(
        "--deadline", type=float, default=DEADLINE, metavar="SECONDS", help="how long to wait for a late process"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument(
        "--data-parallel", action="store_true", help="one process for all CUDA devices, in place of one for each"
    )
    parser.add_argument("--init-method", default="env://", help="where the processes meet (default: as torchrun says)")
    parser.add_argument(
        "--no-synchronise", dest="synchronise", action="store_false", help="leave torch's batch norm in place"
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="save weights, running statistics and timings here")
    parser.add_argument(
        "--keep", type=int, nargs="*", default=[], metavar="STEP", help="also save the state after these steps"
    )
    return parser.parse_args()


if __name__ == "__main__":
    code = 0
    try:
        main()
    except Exception:  # noqa: BLE001 - whatever it is, it is shown, and the interpreter must not be torn down
        traceback.print_exc()
        code = 1
    # Once DistributedDataParallel was used, gloo's threads outlive destroy_process_group, and one that is late may
    # abort an interpreter that is being torn down (pytorch#190489). So this one is not torn down.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
