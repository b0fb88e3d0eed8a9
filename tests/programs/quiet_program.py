"""Three ranks under torchrun train without a fault; each method of `Quiet` has a long wait in a collective of torch."""

import sys
import time

import torch
from torch import distributed, nn

import client
from client.diagnostics.sampler import ThreadSample, ThreadSampler

# Longer than the detection of a deadlock.
LONG = 10.0

questions: list[str] = []


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    model.register_buffer("foreign", torch.zeros(3))
    return client.convert_model(model)


def batch() -> torch.Tensor:
    return torch.randn(4, 8)


class Quiet:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.model = nn.parallel.DistributedDataParallel(network())
        self.pair = distributed.new_group([0, 1])

    def save_a_checkpoint(self) -> None:
        if self.rank == 0:
            time.sleep(LONG)
        distributed.barrier()

    def validate_with_broadcasts(self) -> None:
        """The ranks wait for one another in each forward pass, always for the slowest one."""
        self.model.eval()
        for _ in range(int(LONG)):
            self.model(batch())
            time.sleep(0.5 + 0.25 * self.rank)
        self.model.train()
        distributed.barrier()

    def come_late_to_a_broadcast_of_buffers(self) -> None:
        self.model.eval()
        if self.rank == 2:
            time.sleep(LONG)
        self.model(batch())
        self.model.train()

    def send_messages(self) -> None:
        """Messages between two ranks count as operations: from here on the ranks' counts differ."""
        for _ in range(5):
            if self.rank == 0:
                distributed.send(torch.ones(1), 2)
            if self.rank == 2:
                distributed.recv(torch.ones(1), 0)

    def wait_in_a_smaller_group_first(self) -> None:
        """Rank 2 waits for rank 0 in the default group, and rank 0 for rank 1 in a smaller group."""
        self.send_messages()
        if self.rank == 1:
            time.sleep(LONG)
        if self.rank != 2:
            distributed.barrier(self.pair)
        distributed.barrier()


def count_questions() -> None:
    sample = ThreadSampler.sample

    def counted(self: ThreadSampler, torch_group: str = "") -> ThreadSample:
        questions.append(torch_group)
        return sample(self, torch_group)

    ThreadSampler.sample = counted


def main() -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    count_questions()
    with client.connect() as connection:
        quiet = Quiet(connection.rank)
        for way in sys.argv[1:]:
            quiet.model(batch()).square().sum().backward()
            before = len(questions)
            getattr(quiet, way)()
            # In one write, or the lines of two ranks would mix.
            sys.stdout.write(f"{way} {connection.rank} {'asked' if len(questions) > before else 'forgotten'}\n")
            sys.stdout.flush()
        quiet.model(batch()).square().sum().backward()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
