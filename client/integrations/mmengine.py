"""MMEngine: a layer and a hook for configurations.

    custom_imports = dict(imports=["client.integrations.mmengine"])
    norm_cfg = dict(type="StatsdSyncBN")
    custom_hooks = [dict(type="StatsdBNHook")]

The import registers the layer and the hook for all libraries that use MMEngine. `mmcv.cnn.build_norm_layer` builds the
layer from its type, and returns names such as "bn1" for it.
"""

from typing import TYPE_CHECKING, Any

from mmengine.hooks import Hook
from mmengine.registry import HOOKS, MODELS

from client.integrations import connect_unless_connected
from client.nn.batchnorm import SynchronizedBatchNorm

if TYPE_CHECKING:
    from client.session.connection import Connection

MODELS.register_module("StatsdSyncBN", module=SynchronizedBatchNorm)


@HOOKS.register_module()
class StatsdBNHook(Hook):
    """Connects the ranks while `Runner.train` runs.

    A process that is connected keeps its connection, and a process that is alone in its process group needs none. After
    an exception MMEngine does not call `after_train`: the process disconnects at its end, with the exception as cause.

    Args:
        **options: arguments of `client.connect`, except `rank` and `world_size`, which are the process group's.
    """

    priority = "VERY_HIGH"

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._connection: Connection | None = None

    def before_train(self, runner: Any) -> None:  # noqa: ARG002 - MMEngine's signature
        """Connects."""
        self._connection = connect_unless_connected(**self._options)

    def after_train(self, runner: Any) -> None:  # noqa: ARG002 - MMEngine's signature
        """Disconnects."""
        if self._connection:
            self._connection.close()
            self._connection = None
