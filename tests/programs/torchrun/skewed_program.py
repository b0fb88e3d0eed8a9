"""Three ranks under torchrun, one with brighter images, train until the second server has a finding."""

import itertools
import sys
import time

import torch
from torch import distributed, nn

import client
from server.cli.status import ask
from support.own_server import kill_own_server

# A busy machine needs half a minute.
SECONDS = 90.0

# Steps between two requests for findings; the first server is killed just before the first request.
ASK_STEPS = 50


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.Flatten()
    )


def images(generator: torch.Generator, rank: int, brighter: float) -> torch.Tensor:
    levels = torch.rand(16, 1, 1, 1, generator=generator)
    found = levels + 0.3 * torch.rand(16, 1, 8, 8, generator=generator)
    return found * brighter if rank == 2 else found


def findings(connection: client.Connection) -> list[dict[str, object]]:
    groups = ask(connection.endpoint, SECONDS)["groups"]
    return [finding for group in groups for finding in group.get("findings", ())]


def print_line(connection: client.Connection, line: str) -> None:
    if connection.rank == 0:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def main() -> None:
    brighter = float(sys.argv[1])
    with client.connect() as connection:
        distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(client.convert_model(network()))
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        generator = torch.Generator().manual_seed(connection.rank)
        ends = time.monotonic() + SECONDS
        for step in itertools.count():
            optimizer.zero_grad()
            model(images(generator, connection.rank, brighter)).square().mean().backward()
            optimizer.step()
            if step == ASK_STEPS:
                kill_own_server()
            if step and step % ASK_STEPS == 0:
                is_over = torch.tensor(float(bool(findings(connection)) or time.monotonic() > ends))
                distributed.broadcast(is_over, 0)
                if is_over:
                    break
        print_line(connection, f"transport {connection.transport}")
        for finding in findings(connection):
            print_line(connection, f"found {finding['kind']} of rank {finding['rank']} in layer {finding['layer']}")
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
