"""Public API of the client: synchronised batch-norm layers, and the connection they use.

Two lines synchronise a model: `model = client.convert_model(model)`, and `with client.connect(endpoint):` around its
training. A single process under `client.DataParallelWithCallback` needs only the first.
"""

from client.data_parallel.replicate import (
    CallbackContext,
    DataParallelWithCallback,
    execute_replication_callbacks,
    patch_replication_callback,
)
from client.elastic.sampler import ElasticSampler
from client.elastic.state import ElasticState, MembersChanged, run_elastic
from client.launch.connect import connect
from client.nn.batchnorm import (
    LazySynchronizedBatchNorm1d,
    LazySynchronizedBatchNorm2d,
    LazySynchronizedBatchNorm3d,
    SynchronizedBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    set_sbn_eps_mode,
)
from client.nn.conversion import (
    ConversionReport,
    conversion_report,
    convert_model,
    patch_sync_batchnorm,
    register_conversion,
    revert_model,
)
from client.nn.subclasses import rebuilt_layer as rebuilt_layer  # not public, but pickles name it
from client.nn.subclasses import synchronized_class
from client.session.connection import Connection, current_connection, disconnect, local_group
from client.session.groups import Group
from client.training.ddp_handler import DDPHandler
from client.training.gradients import average_gradients
from client.training.join import commit_running_statistics, join
from client.training.moments import BatchMoments, RunningMoments, moments
from client.training.recalibration import recalibrate
from client.training.smart_ddp import smart_DDP, smart_ddp
from client.transports.process_group import NamedProcessGroup as NamedProcessGroup  # not public, but pickles name it
from client.transports.server import SlavePipe

__all__ = ["Connection", "Group", "connect", "current_connection", "disconnect", "local_group"]
__all__ += ["SynchronizedBatchNorm", "SynchronizedBatchNorm1d", "SynchronizedBatchNorm2d", "SynchronizedBatchNorm3d"]
__all__ += ["LazySynchronizedBatchNorm1d", "LazySynchronizedBatchNorm2d", "LazySynchronizedBatchNorm3d"]
__all__ += ["ConversionReport", "conversion_report", "convert_model", "patch_sync_batchnorm", "register_conversion"]
__all__ += ["revert_model", "set_sbn_eps_mode", "synchronized_class"]
__all__ += ["CallbackContext", "DataParallelWithCallback", "execute_replication_callbacks"]
__all__ += ["patch_replication_callback"]
__all__ += ["BatchMoments", "DDPHandler", "RunningMoments", "average_gradients", "commit_running_statistics", "join"]
__all__ += ["moments", "recalibrate", "smart_DDP", "smart_ddp"]
__all__ += ["ElasticSampler", "ElasticState", "MembersChanged", "SlavePipe", "run_elastic"]

# Pickles contain the name of a class's module. Set it to `client`, so that old pickles load after a class has moved.
for _name in (*__all__, "NamedProcessGroup"):
    if isinstance(_class := globals()[_name], type):
        _class.__module__ = __name__
