"""Trains on the digits as one of several processes: a script to start from.

torchrun --nproc-per-node 4 examples/train_digits.py

Two lines make its batch norm synchronised: `client.convert_model`, and `client.connect`, which reads RANK and
WORLD_SIZE and lets rank 0 start a server, or uses the server at STATSD_BN_ENDPOINT. DistributedDataParallel averages
the gradients as usual.
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

# Timeout of rounds and of gloo, in seconds; torch's default is half an hour.
DEADLINE = 60.0

PRINT_EVERY = 10


def main() -> None:
    """Trains; rank 0 prints the loss and saves the results."""
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
    # Before connect(): torch imports its compiler here, and on a slow machine holds Python's global lock for so long
    # that the server would report this process lost.
    model = parallel(network, options)
    connecting = client.connect(round_timeout=options.deadline) if options.synchronise else nullcontext()
    with connecting as connection, lost_rank_named():
        for step, loss in train(model, options.steps, rank, world_size):
            if rank == 0 and step % PRINT_EVERY == 0:
                print(f"step {step} of {options.steps}: loss {loss:.3f}", flush=True)
            if step in {*options.keep, options.steps}:
                states[step] = snapshot(network)
    if rank == 0 and options.save:
        torch.save({"states": states, **round_figures(connection)}, options.save)
    # Destroy the group only after every rank's last exchange, and after the model: freeing the model later may wait for
    # a gloo thread that waits for the interpreter.
    distributed.barrier()
    del model
    distributed.destroy_process_group()


def store(options: argparse.Namespace, rank: int, world_size: int) -> distributed.Store:
    """Returns the rendezvous store, with a prefix for each restart by `torchrun --max-restarts`.

    Torchrun keeps one store for all restarts, where gloo would find addresses of ended processes (pytorch#135712). It
    counts restarts per node, so this is for one node; for several, start torchrun with
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
    """
    found, _, _ = next(distributed.rendezvous(options.init_method, rank, world_size))
    is_one_node = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_one_node else "0"
    return distributed.PrefixStore(f"start {restarts}", found)


def device(options: argparse.Namespace) -> torch.device:
    """Returns the device of this process; CUDA devices are assigned by LOCAL_RANK, round robin."""
    if options.device != "cuda":
        return torch.device(options.device)
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def parallel(network: nn.Module, options: argparse.Namespace) -> nn.Module:
    """Returns the network in DataParallelWithCallback or in DistributedDataParallel."""
    return client.DataParallelWithCallback(network) if options.data_parallel else DistributedDataParallel(network)


@contextmanager
def lost_rank_named() -> Iterator[None]:
    """Raises an error with the rank of a lost process if gloo notices the loss first, since gloo knows only an address.

    Raises:
        ReplicaLost: from the server; names the lost process.
    """
    try:
        yield
    except RuntimeError as error:
        if "gloo" in str(error) and client.current_connection():
            client.SynchronizedBatchNorm1d(1)(torch.zeros(2, 1))
        raise


def round_figures(connection: client.Connection | None) -> dict[str, float]:
    """Returns number and median duration of the rounds, if there is a connection."""
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
        "--data-parallel", action="store_true", help="one process for all CUDA devices, instead of one for each"
    )
    parser.add_argument("--init-method", default="env://", help="rendezvous of the processes (default: torchrun's)")
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
    except Exception:  # noqa: BLE001 - printed; the interpreter must not be torn down
        traceback.print_exc()
        code = 1
    # After DistributedDataParallel, gloo's threads outlive destroy_process_group, and a late one may abort the
    # interpreter during its teardown (pytorch#190489). So exit without a teardown.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
