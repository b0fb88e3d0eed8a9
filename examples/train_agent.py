"""Trains a toy agent with statistics of all ranks' observations and returns, without a batch-norm layer.

torchrun --nproc-per-node 2 examples/train_agent.py

Each rank heats separate rooms, and rank 0 has twice as many as the others. Observations are in kelvin and pascal, so
the agent learns only if they are normalised, with the same statistics on every rank.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import client

ROOMS = 32
STEPS = 20
TARGET = 295.0  # K
LOOKAHEAD = 5

# Cool, wait or heat, in kelvin per step.
EFFECTS = torch.tensor([-2.0, 0.0, 2.0])


def observe(kelvin: Tensor) -> Tensor:
    """Returns the temperature of each room and an air pressure without information, shape (..., 2)."""
    return torch.stack((kelvin, 101_325 + 500 * torch.randn_like(kelvin)), dim=-1)


def play(agent: nn.Module, rooms: int) -> tuple[Tensor, Tensor, Tensor]:
    """Plays an episode in all rooms; returns observations, actions and returns, of shape (STEPS, rooms, ...)."""
    kelvin = TARGET + 8 * torch.randn(rooms)
    observations, actions, rewards = [], [], []
    for _ in range(STEPS):
        observations.append(observe(kelvin))
        with torch.no_grad():
            actions.append(Categorical(logits=agent(observations[-1])).sample())
        kelvin = kelvin + EFFECTS[actions[-1]] + 0.5 * torch.randn(rooms)
        rewards.append(-(kelvin - TARGET).abs())
    returns = [torch.stack(rewards[step : step + LOOKAHEAD]).mean(0) for step in range(STEPS)]
    return torch.stack(observations), torch.stack(actions), torch.stack(returns)


def train(rank: int, iterations: int) -> nn.Sequential:
    """Trains by policy gradient, and prints the mean return of all ranks."""
    torch.manual_seed(0)
    agent = nn.Sequential(client.RunningMoments(2), nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, len(EFFECTS)))
    optimizer = torch.optim.Adam(agent.parameters(), lr=0.02)
    torch.manual_seed(rank)  # all ranks have the same agent, and different rooms
    for iteration in range(iterations):
        observations, actions, returns = play(agent, ROOMS if rank else 2 * ROOMS)
        agent[0].update(observations)
        whole = client.moments(returns, dim=None)
        advantages = (returns - whole.mean) / whole.var.sqrt()
        optimizer.zero_grad()
        (-Categorical(logits=agent(observations)).log_prob(actions) * advantages).sum().backward()
        client.average_gradients(agent, advantages.numel())
        optimizer.step()
        if rank == 0:
            print(f"iteration {iteration}: mean return {whole.mean:.3f} of {whole.count} steps", flush=True)
    return agent


def main() -> None:
    """Trains as the launcher's rank, and saves the agent."""
    parser = argparse.ArgumentParser(description="Trains a toy agent in the processes that torchrun starts.")
    parser.add_argument("--iterations", type=int, default=40, help="(default: 40)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="save weights and statistics here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with client.connect() as connection:
        agent = train(connection.rank, options.iterations)
    if options.save:
        torch.save(agent.state_dict(), options.save)


if __name__ == "__main__":
    main()
