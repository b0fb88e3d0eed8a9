"""MONAI: the norm that networks take by name, `UNet(..., norm="statsdbatch")`.

The import registers it with `monai.networks.layers.Norm`, for 1, 2 and 3 dimensions. Arguments stand beside the name as
for MONAI's own: `norm=("statsdbatch", {"momentum": 0.01})`.
"""

from monai.networks.layers.factories import Norm

from client.nn.batchnorm import SynchronizedBatchNorm1d, SynchronizedBatchNorm2d, SynchronizedBatchNorm3d

NAME = "statsdbatch"


def statsd_batch_factory(dim: int) -> type[SynchronizedBatchNorm1d | SynchronizedBatchNorm2d | SynchronizedBatchNorm3d]:
    """Synchronised batch norm over 1, 2 or 3 dimensions.

    Args:
        dim: how many dimensions a channel has.
    """
    return (SynchronizedBatchNorm1d, SynchronizedBatchNorm2d, SynchronizedBatchNorm3d)[dim - 1]


Norm.add_factory_callable(NAME, statsd_batch_factory)
