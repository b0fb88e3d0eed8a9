"""The training loop of a whole batch, of a member of a group, and of replicas in one process."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

import digits

LEARNING_RATE = 0.05


def train(model: nn.Module, steps: int, member: int = 0, members: int = 1) -> Iterator[tuple[int, float]]:
    """Trains `model` with SGD, and yields the step and the loss after each step.

    Args:
        model: maps (N, 1, 8, 8) to (N, 10), and averages the gradients of several members.
        steps: batches to train with.
        member: number of this process's part of each batch.
        members: number of parts.
    """
    # Small tensors, and perhaps more processes than cores: threads would compete.
    torch.set_num_threads(1)
    images, _ = digits.load(device=next(model.parameters()).device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step, batch in enumerate(digits.batches(steps), start=1):
        mine = batch.chunk(members)[member]
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images.pixels[mine]), images.labels[mine])
        loss.backward()
        optimizer.step()
        yield step, loss.item()


def snapshot(network: nn.Module) -> digits.State:
    """Returns a copy of the weights and running statistics on the CPU."""
    return {name: value.detach().cpu().clone() for name, value in network.state_dict().items()}
