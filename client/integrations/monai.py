"""MONAI: a norm for networks, by name: `UNet(..., norm="statsdbatch")`.

Importing this module registers the norm with `monai.networks.layers.Norm`, for 1, 2 and 3 dimensions. Arguments follow
the name, as for MONAI's own norms: `norm=("statsdbatch", {"momentum": 0.01})`.
"""

from monai.networks.layers.factories import Norm

from client.nn.batchnorm import SynchronizedBatchNorm1d, SynchronizedBatchNorm2d, SynchronizedBatchNorm3d

NAME = "statsdbatch"


def statsd_batch_factory(dim: int) -> type[SynchronizedBatchNorm1d | SynchronizedBatchNorm2d | SynchronizedBatchNorm3d]:
    """Return the class of synchronised batch norm for 1, 2 or 3 spatial dimensions."""
    return (SynchronizedBatchNorm1d, SynchronizedBatchNorm2d, SynchronizedBatchNorm3d)[dim - 1]


Norm.add_factory_callable(NAME, statsd_batch_factory)
