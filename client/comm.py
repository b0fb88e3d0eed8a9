"""What users of Synchronized-BatchNorm-PyTorch import from `sync_batchnorm.comm`.

`client.comm.SlavePipe` leads to another replica of this process, `client.SlavePipe` to the server.
"""

from client.data_parallel.sync_master import FutureResult, SlavePipe, SyncMaster

__all__ = ["FutureResult", "SlavePipe", "SyncMaster"]
