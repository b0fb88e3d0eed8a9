"""Names of `sync_batchnorm.replicate` in Synchronized-BatchNorm-PyTorch; all are in `client` too."""

from client.data_parallel.replicate import (
    CallbackContext,
    DataParallelWithCallback,
    execute_replication_callbacks,
    patch_replication_callback,
)

__all__ = ["CallbackContext", "DataParallelWithCallback", "execute_replication_callbacks", "patch_replication_callback"]
