"""What member processes do in `test_restart.py`: train while the server is killed and started again."""

import hashlib
import time

import torch
from torch import nn

import client


def train(
    endpoint: str,
    job: str,
    member: int,
    world_size: int,
    steps: int,
    pause: float,
    transport: str = "server",
) -> str:
    """Returns a digest of all weights and buffers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3), nn.BatchNorm1d(3)).double()
    client.convert_model(model)
    model[1].group = client.Group(f"half {member // 2}", 2 if member < 2 else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(member)
    with client.connect(endpoint, job=job, rank=member, world_size=world_size, round_timeout=60.0, transport=transport):
        for _ in range(steps):
            x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
            optimizer.zero_grad()
            ((model(x) - x[:, :3]) ** 2).mean().backward()
            optimizer.step()
            time.sleep(pause * (1 + member))
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        assert value.isfinite().all(), "bits that say something"
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()
