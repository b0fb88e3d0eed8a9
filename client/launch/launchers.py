"""Launchers: what their variables say of a process's rank, its job, and where torch's store is.

torchrun's names are the common ones, and Kubeflow's PyTorchJob sets them too: RANK, WORLD_SIZE, MASTER_ADDR,
MASTER_PORT. They win over SLURM's, see `client.launch.slurm`. Some set-ups count nodes in WORLD_SIZE, for a
torchrun on each node; the job would be too small and the processes would be grouped wrongly, so this is an error.

Everything here is a function of a mapping, so that a test needs no environment of its own.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from typing import NamedTuple

from client.launch import slurm
from client.launch.sources import Setting, found
from statsd_bn.environment import integer, optional_integer
from statsd_bn.errors import ConfigurationError

LAST_PORT = 65_535

# What torchrun calls a run that was given no id, unless it makes one up.
NO_RUN_ID = ("", "none")

# A name, or an address of IPv4.
_NAME = re.compile(r"[\w.-]+")


class StoreAddress(NamedTuple):
    """Where torch's store of a job listens."""

    host: str
    port: int


def rank(environ: Mapping[str, str]) -> Setting[int] | None:
    """Returns this process's rank; None where no launcher says it."""
    return found("rank", optional_integer(environ, "RANK"), "RANK") or found(
        "rank", slurm.rank(environ), "SLURM_PROCID"
    )


def world_size(environ: Mapping[str, str]) -> Setting[int] | None:
    """Returns how many processes there are; None where no launcher says it.

    Raises:
        ConfigurationError: WORLD_SIZE counts nodes.
    """
    given = optional_integer(environ, "WORLD_SIZE")
    if given is None:
        return found("world_size", slurm.tasks(environ), "SLURM_STEP_NUM_TASKS")
    if evidence := _counts_nodes(environ, given):
        raise ConfigurationError(
            f"WORLD_SIZE: expected the number of processes, got {given}, which counts nodes: {evidence}. Start the "
            "processes of each node by torchrun, which sets RANK and WORLD_SIZE for each, or set both yourself, or "
            "pass rank and world_size"
        )
    return Setting("world_size", given, "WORLD_SIZE")


def job(environ: Mapping[str, str]) -> Setting[str] | None:
    """Returns the run's name; None where no launcher has given it one."""
    run_id = environ.get("TORCHELASTIC_RUN_ID")
    return found("job", None if run_id in NO_RUN_ID else run_id, "TORCHELASTIC_RUN_ID") or found(
        "job", slurm.job(environ), "SLURM_JOB_ID"
    )


def epoch(environ: Mapping[str, str]) -> Setting[int] | None:
    """Returns how often the launcher has restarted the processes; None where it does not say."""
    restarts = optional_integer(environ, "TORCHELASTIC_RESTART_COUNT")
    return found("epoch", restarts, "TORCHELASTIC_RESTART_COUNT") or found(
        "epoch", slurm.restarts(environ), "SLURM_RESTART_COUNT"
    )


def store_address(environ: Mapping[str, str]) -> Setting[StoreAddress] | None:
    """Returns where torch's store of this job listens; None where no launcher says it.

    Raises:
        ConfigurationError: a value is unusable.
    """
    address = found("store", environ.get("MASTER_ADDR") or None, "MASTER_ADDR") or found(
        "store", slurm.address(environ), "SLURM_STEP_NODELIST"
    )
    given = optional_integer(environ, "MASTER_PORT")
    port = slurm.port(environ) if given is None else given
    if not address or port is None:
        return None
    if not 1 <= port <= LAST_PORT:
        raise ConfigurationError(f"MASTER_PORT: expected a port from 1 to {LAST_PORT}, got {port}")
    if not (_NAME.fullmatch(address.value) or _is_ipv6(address.value)):
        raise ConfigurationError(
            f"MASTER_ADDR: expected a host's name or address and nothing else, got {address.value!r:.80}"
        )
    return Setting("store", StoreAddress(address.value, port), address.source)


def is_one_node(environ: Mapping[str, str], store: StoreAddress, processes: int) -> bool:
    """Returns whether all processes are on this host, as far as their launcher says."""
    if _is_loopback(store.host):
        # A process on another host could not reach it.
        return True
    local = optional_integer(environ, "LOCAL_WORLD_SIZE")
    if local is None:
        return processes == 1 or slurm.nodes(environ) == 1
    return local == processes


def _is_loopback(host: str) -> bool:
    """Whether a host is this one by its name or its literal address; any other name may mean anything."""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def _is_ipv6(address: str) -> bool:
    with suppress(ValueError):
        return bool(IPv6Address(address))
    return False


def _counts_nodes(environ: Mapping[str, str], given: int) -> str:
    """Returns the variables that prove that WORLD_SIZE counts nodes, or "" if none do."""
    local = optional_integer(environ, "LOCAL_WORLD_SIZE")
    if local is not None:
        return f"this node alone has LOCAL_WORLD_SIZE={local}" if local > given else ""
    return _kubeflow_counts_nodes(environ, given) or _slurm_counts_nodes(environ, given)


def _kubeflow_counts_nodes(environ: Mapping[str, str], given: int) -> str:
    """A PyTorchJob with several processes per pod expects torchrun to start them, and torchrun sets LOCAL_RANK."""
    nodes, per_node = environ.get("PET_NNODES", ""), environ.get("PET_NPROC_PER_NODE", "")
    if environ.get("LOCAL_RANK") or nodes != str(given) or not per_node.isdecimal() or per_node == "1":
        return ""
    return f"PET_NNODES={nodes}, PET_NPROC_PER_NODE={per_node}"


def _slurm_counts_nodes(environ: Mapping[str, str], given: int) -> str:
    tasks, nodes = slurm.tasks(environ), optional_integer(environ, "SLURM_NNODES")
    # A task may be told to train alone; that is no mistake.
    is_alone = given == 1 and integer(environ, "RANK", -1) == 0
    if tasks is None or nodes != given or tasks <= given or is_alone:
        return ""
    return f"SLURM_NNODES={nodes}, SLURM_STEP_NUM_TASKS={tasks}"
