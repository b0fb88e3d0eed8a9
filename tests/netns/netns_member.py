"""A member on its own host: trains and prints a line per step; the last line is JSON with digest or error, and time."""

import json
import sys
import time

import torch
from torch import nn

import client
from programs.chaos_programs import digest_of
from support.memory_members import outcome


def train(steps: int, member: int) -> str:
    """Trains on this member's data; returns a digest of all weights and buffers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()
    client.convert_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(member)
    for step in range(steps):
        x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        (model(x) - torch.sin(x[:, :3])).square().mean().backward()
        optimizer.step()
        print(f"step {step}", flush=True)
    return digest_of(model)


def main() -> None:
    endpoint, member, world_size, steps, deadline = sys.argv[1:]

    def run() -> str:
        with client.connect(
            endpoint, rank=int(member), world_size=int(world_size), round_timeout=float(deadline), join_timeout=120.0
        ):
            return train(int(steps), int(member))

    found = outcome(run)
    result = {"digest": found} if isinstance(found, str) else {"error": type(found).__name__, "text": str(found)}
    fields = {
        name: value for name, value in getattr(found, "fields", {}).items() if isinstance(value, int | str | list)
    }
    print(json.dumps({**result, "fields": fields, "at": time.monotonic()}), flush=True)


if __name__ == "__main__":
    main()
