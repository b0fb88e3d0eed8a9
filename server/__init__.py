"""The aggregation process: `python -m server`, or `run_master` in code. It needs no torch."""

from server.config import Config
from server.master import SyncMaster
from server.rounds import FutureResult
from server.service import Service, run_master

__all__ = ["Config", "FutureResult", "Service", "SyncMaster", "run_master"]
