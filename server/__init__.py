"""The aggregation process: `python -m server`, or `run_master` in code.

It needs no torch. This file only exports the public names.
"""

from server.config import Config
from server.group.master import SyncMaster
from server.group.rounds import FutureResult
from server.network.service import Service, run_master

__all__ = ["Config", "FutureResult", "Service", "SyncMaster", "run_master"]
