"""Names of `sync_batchnorm.batchnorm` in Synchronized-BatchNorm-PyTorch; all are in `client` too."""

from client.nn.batchnorm import (
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    set_sbn_eps_mode,
)
from client.nn.conversion import convert_model, patch_sync_batchnorm

__all__ = ["SynchronizedBatchNorm1d", "SynchronizedBatchNorm2d", "SynchronizedBatchNorm3d"]
__all__ += ["convert_model", "patch_sync_batchnorm", "set_sbn_eps_mode"]
