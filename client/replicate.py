"""What users of Synchronized-BatchNorm-PyTorch import from `sync_batchnorm.replicate`; all of it is in `client` too."""

from client.data_parallel.replicate import (
    CallbackContext,
    DataParallelWithCallback,
    execute_replication_callbacks,
    patch_replication_callback,
)

__all__ = [
    "CallbackContext",
    "DataParallelWithCallback",
    "execute_replication_callbacks",
    "patch_replication_callback",
]
