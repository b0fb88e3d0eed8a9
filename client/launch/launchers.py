"""Launchers: a process's rank, world size, job and store address according to the variables of its launcher.

torchrun and Kubeflow's PyTorchJob set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which take precedence over SLURM's
variables. srun numbers the tasks of a step and counts them (https://slurm.schedmd.com/srun.html), but names no address
for torch's store: it is on the first host of the step, at a port computed from the numbers of job and step.

A script that starts its processes itself, as with `torch.multiprocessing.spawn`, initialises torch's process group with
their ranks. The group's store then replaces the launcher's.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, NamedTuple

from torch import distributed

from statsd_bn.environment import integer
from statsd_bn.errors import ConfigurationError
from statsd_bn.limits import MAX_COUNTER

# Sources of a setting besides variables.
ARGUMENT, DEFAULT, PROCESS_GROUP = "argument", "default", "process group"

MAX_PORT = 65_535
NO_RUN_ID = ("", "none")  # TORCHELASTIC_RUN_ID without a run id
_HOST = re.compile(r"[\w.-]+")  # a host name, or an IPv4 address

# Ports for a step: below the ephemeral ports (32768 and more on Linux), above the ports of known services.
FIRST_PORT = PORTS = 15_000
STEP_STRIDE = 101  # steps of one job may share a host; a prime spreads their ports

# A list of hosts, whose first name is group 1: "a,b", "node[01-04,07]", "rack[1-2]node[3,5]-ib".
_HOSTS = re.compile(r"((?:[^\[\],\s]|\[[^\[\]\s]+\])+)(?:,.*)?")
_NUMBERS = re.compile(r"\[([0-9]+)(?:[-,][0-9,-]*)?\]")


@dataclass(frozen=True, slots=True)
class Setting:
    """An argument of `client.connect` and its source, for errors and the log: "world_size 4 (WORLD_SIZE)"."""

    name: str
    value: Any
    source: str

    def __str__(self) -> str:
        return f"{self.name} {self.value!r:.80} ({self.source})"


def optional(name: str, value: Any, source: str) -> Setting | None:
    """Returns a setting; None if the source has no value, so that `or` tries the next source."""
    return None if value is None else Setting(name, value, source)


class StoreAddress(NamedTuple):
    """The address of torch's store of a job."""

    host: str
    port: int


class ProcessGroup(NamedTuple):
    """This process in torch's default process group."""

    rank: int
    size: int


def rank(environ: Mapping[str, str]) -> Setting | None:
    """Returns this process's rank; None without a launcher."""
    return _integer(environ, "RANK", "SLURM_PROCID", "rank")


def world_size(environ: Mapping[str, str]) -> Setting | None:
    """Returns the number of processes; None without a launcher.

    Some platforms set WORLD_SIZE to the number of nodes; the job would be too small, so this is an error.
    """
    size = _integer(environ, "WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "world_size")
    if size and size.source == "WORLD_SIZE" and (evidence := _counts_nodes(environ, size.value)):
        raise ConfigurationError(
            f"WORLD_SIZE: expected the number of processes, got {size.value}, which counts nodes: {evidence}. Start "
            "the processes of each node by torchrun, which sets RANK and WORLD_SIZE for each, or set both yourself, or "
            "pass rank and world_size"
        )
    return size


def job(environ: Mapping[str, str]) -> Setting | None:
    """Returns the run's name; None if the launcher has none. Each step of a SLURM job is a run."""
    if (run_id := environ.get("TORCHELASTIC_RUN_ID", "")) not in NO_RUN_ID:
        return Setting("job", run_id, "TORCHELASTIC_RUN_ID")
    number = _task(environ).get("SLURM_JOB_ID")
    name = f"slurm-{number}.{environ.get('SLURM_STEP_ID', '0')}" if number else None
    return optional("job", name, "SLURM_JOB_ID")


def epoch(environ: Mapping[str, str]) -> Setting:
    """Returns how often the launcher has restarted the processes; 0 if it does not count restarts."""
    count = _integer(environ, "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", "epoch")
    count = count or Setting("epoch", 0, DEFAULT)
    if not 0 <= count.value <= MAX_COUNTER:
        raise ConfigurationError(f"{count.source}: expected 0 to {MAX_COUNTER}, got {count.value}")
    return count


def store_address(environ: Mapping[str, str]) -> Setting | None:
    """Returns the address of torch's store of this job; None without a launcher."""
    host, source = environ.get("MASTER_ADDR"), "MASTER_ADDR"
    if not host and (hosts := _task(environ).get("SLURM_STEP_NODELIST")):
        host, source = first_host(hosts), "SLURM_STEP_NODELIST"
    port = integer(environ, "MASTER_PORT", None)
    port = step_port(environ) if port is None else port
    if not host or port is None:
        return None
    if not 1 <= port <= MAX_PORT:
        raise ConfigurationError(f"MASTER_PORT: expected a port from 1 to {MAX_PORT}, got {port}")
    if not (_HOST.fullmatch(host) or _address(host)):
        raise ConfigurationError(f"MASTER_ADDR: expected a host's name or address and nothing else, got {host!r:.80}")
    return Setting("store", StoreAddress(host, port), source)


def is_one_node(environ: Mapping[str, str], store: StoreAddress, processes: int) -> bool:
    """Returns whether all processes are on this host according to their launcher."""
    address, task = _address(store.host), _task(environ)
    # No other host can reach a store on a loopback address. Other names than "localhost" may resolve to anything.
    if store.host == "localhost" or (address and address.is_loopback):
        return True
    if (local := integer(environ, "LOCAL_WORLD_SIZE", None)) is not None:
        return local == processes
    nodes = integer(task, "SLURM_STEP_NUM_NODES", None) or integer(task, "SLURM_NNODES", None)
    return processes == 1 or nodes == 1


def find_process_group() -> ProcessGroup | None:
    """Returns torch's default process group; None while it is not initialised."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    return ProcessGroup(distributed.get_rank(), distributed.get_world_size())


def step_port(environ: Mapping[str, str]) -> int | None:
    """Returns the store's port for a step of srun; two jobs on one host rarely get the same."""
    if (number := integer(_task(environ), "SLURM_JOB_ID", None)) is None:
        return None
    return FIRST_PORT + (number + STEP_STRIDE * integer(environ, "SLURM_STEP_ID", 0)) % PORTS


def first_host(hosts: str) -> str:
    """Returns the first name of a list in SLURM's format: "node[01-04,07]" means node01 to node04 and node07."""
    match = _HOSTS.fullmatch(hosts)
    name = _NUMBERS.sub(r"\1", match[1]) if match else ""
    if not name or "[" in name:
        raise ConfigurationError(
            f"SLURM_STEP_NODELIST: expected hosts such as node[01-04,07] or a,b, got {hosts!r:.80}; "
            "set MASTER_ADDR to the host of task 0"
        )
    return name


def _task(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Returns the variables of a task that srun has started, else none; a batch script has SLURM_PROCID too."""
    return environ if environ.get("SLURM_STEP_NUM_TASKS") and environ.get("SLURM_PROCID") else {}


def _integer(environ: Mapping[str, str], variable: str, of_task: str, name: str) -> Setting | None:
    """Returns the number in a variable, or else in a task's variable."""
    setting = optional(name, integer(environ, variable, None), variable)
    return setting or optional(name, integer(_task(environ), of_task, None), of_task)


def _address(host: str) -> IPv4Address | IPv6Address | None:
    with suppress(ValueError):
        return ip_address(host)
    return None


def _counts_nodes(environ: Mapping[str, str], world_size: int) -> str:
    """Returns the variables that prove that WORLD_SIZE counts nodes, or "" if none do."""
    if (local := integer(environ, "LOCAL_WORLD_SIZE", None)) is not None:
        return f"this node alone has LOCAL_WORLD_SIZE={local}" if local > world_size else ""
    # A PyTorchJob with several processes per pod expects torchrun to start them, and torchrun sets LOCAL_RANK.
    nodes, per_node = environ.get("PET_NNODES", ""), environ.get("PET_NPROC_PER_NODE", "")
    is_pod = not environ.get("LOCAL_RANK") and nodes == str(world_size)
    if is_pod and per_node.isdecimal() and per_node != "1":
        return f"PET_NNODES={nodes}, PET_NPROC_PER_NODE={per_node}"
    tasks, in_slurm = (integer(_task(environ), "SLURM_STEP_NUM_TASKS", None), integer(environ, "SLURM_NNODES", None))
    # A single task may deliberately train alone.
    is_alone = world_size == 1 and integer(environ, "RANK", -1) == 0
    if tasks is None or in_slurm != world_size or tasks <= world_size or is_alone:
        return ""
    return f"SLURM_NNODES={in_slurm}, SLURM_STEP_NUM_TASKS={tasks}"
