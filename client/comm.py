"""Names of `sync_batchnorm.comm` in Synchronized-BatchNorm-PyTorch.

`client.comm.SlavePipe` connects replicas of this process; `client.SlavePipe` connects a layer to the server.
"""

from client.data_parallel.sync_master import FutureResult, SlavePipe, SyncMaster

__all__ = ["FutureResult", "SlavePipe", "SyncMaster"]
