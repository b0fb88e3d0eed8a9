"""What users of Synchronized-BatchNorm-PyTorch import from `sync_batchnorm.batchnorm`; all of it is in `client` too."""

from client.nn.batchnorm import SynchronizedBatchNorm1d, SynchronizedBatchNorm2d, SynchronizedBatchNorm3d
from client.nn.conversion.convert import convert_model, patch_sync_batchnorm
from client.nn.synchronized import set_sbn_eps_mode

__all__ = [
    "SynchronizedBatchNorm1d",
    "SynchronizedBatchNorm2d",
    "SynchronizedBatchNorm3d",
    "convert_model",
    "patch_sync_batchnorm",
    "set_sbn_eps_mode",
]
