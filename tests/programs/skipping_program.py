"""Two ranks train a small network, and in the last step one of them skips a layer."""

import torch
from torch import nn

import client

STEPS = 3


def main() -> None:
    with client.connect() as connection:
        torch.manual_seed(0)
        layers = nn.ModuleDict({"first": nn.BatchNorm1d(4), "second": nn.BatchNorm1d(4)})
        model = client.convert_model(layers)
        for step in range(STEPS):
            output = model["first"](torch.randn(8, 4, requires_grad=True))
            if not (connection.rank == 1 and step == STEPS - 1):
                output = model["second"](output)
            output.sum().backward()


if __name__ == "__main__":
    main()
