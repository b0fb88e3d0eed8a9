"""Launchers: what their variables say of a process's rank, its job, and where torch's store is.

torchrun's names are the common ones, and Kubeflow's PyTorchJob sets them too: RANK, WORLD_SIZE, MASTER_ADDR,
MASTER_PORT. They win over SLURM's. Some set-ups count nodes in WORLD_SIZE, for a torchrun on each node; the job would
be too small and the processes would be grouped wrongly, so this is an error.

srun numbers the tasks and says how many its step has. It names no address for a store, so we take the first host of the
step, and a port computed from the job's number. SLURM_STEP_NUM_TASKS tells its tasks apart from the batch script, which
has SLURM_PROCID and SLURM_NTASKS too. https://slurm.schedmd.com/srun.html, "Output environment variables".

A script that starts its processes itself, by `torch.multiprocessing.spawn` say, tells each its rank when it initialises
torch's process group. The group's store then takes the place of the launcher's.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Generic, NamedTuple, TypeVar

from torch import distributed

from statsd_bn.environment import integer, optional_integer
from statsd_bn.errors import ConfigurationError

T_co = TypeVar("T_co", covariant=True)
Value = TypeVar("Value")

# Sources of a setting that are not variables.
ARGUMENT = "argument"
DEFAULT = "default"
PROCESS_GROUP = "process group"

LAST_PORT = 65_535

# What torchrun calls a run that was given no id, unless it makes one up.
NO_RUN_ID = ("", "none")

# A name, or an address of IPv4.
_NAME = re.compile(r"[\w.-]+")

# Ports for a step: below those of outgoing connections (32768 and more on Linux), above those of known services.
FIRST_PORT = 15_000
PORTS = 15_000

# Steps of one job may share a host; a prime spreads their ports.
STEP_STRIDE = 101

# The first name of a list: "a,b", "node[01-04,07]", "rack[1-2]node[3,5]-ib".
_FIRST_NAME = re.compile(r"(?:[^\[\],\s]|\[[^\[\]\s]+\])+")
_NUMBERS = re.compile(r"\[([0-9]+)(?:[-,][0-9,-]*)?\]")


@dataclass(frozen=True, slots=True)
class Setting(Generic[T_co]):
    """One value, and its source for errors and the log; as text "world_size 4 (WORLD_SIZE)".

    Attributes:
        name: what the argument of `client.connect` is called.
        source: "argument", "default", "process group", or the environment variable that gave it.
    """

    name: str
    value: T_co
    source: str

    def __str__(self) -> str:
        return f"{self.name} {self.value!r:.80} ({self.source})"


def found(name: str, value: Value | None, source: str) -> Setting[Value] | None:
    """Returns the setting, or None where the source gives no value; so that sources can be joined by `or`."""
    return None if value is None else Setting(name, value, source)


class StoreAddress(NamedTuple):
    """Where torch's store of a job listens."""

    host: str
    port: int


class ProcessGroup(NamedTuple):
    """This process in torch's default process group."""

    rank: int
    size: int


def rank(environ: Mapping[str, str]) -> Setting[int] | None:
    """Returns this process's rank; None where no launcher says it."""
    return found("rank", optional_integer(environ, "RANK"), "RANK") or found(
        "rank", _of_task(environ, "SLURM_PROCID"), "SLURM_PROCID"
    )


def world_size(environ: Mapping[str, str]) -> Setting[int] | None:
    """Returns how many processes there are; None where no launcher says it.

    Raises:
        ConfigurationError: WORLD_SIZE counts nodes.
    """
    given = optional_integer(environ, "WORLD_SIZE")
    if given is None:
        return found("world_size", _of_task(environ, "SLURM_STEP_NUM_TASKS"), "SLURM_STEP_NUM_TASKS")
    if evidence := _counts_nodes(environ, given):
        raise ConfigurationError(
            f"WORLD_SIZE: expected the number of processes, got {given}, which counts nodes: {evidence}. Start the "
            "processes of each node by torchrun, which sets RANK and WORLD_SIZE for each, or set both yourself, or "
            "pass rank and world_size"
        )
    return Setting("world_size", given, "WORLD_SIZE")


def job(environ: Mapping[str, str]) -> Setting[str] | None:
    """Returns the run's name; None where no launcher has given it one. Each step of SLURM's is a run of its own."""
    run_id, number = environ.get("TORCHELASTIC_RUN_ID"), environ.get("SLURM_JOB_ID")
    if run_id is not None and run_id not in NO_RUN_ID:
        return Setting("job", run_id, "TORCHELASTIC_RUN_ID")
    if not (number and _is_task(environ)):
        return None
    return Setting("job", f"slurm-{number}.{environ.get('SLURM_STEP_ID', '0')}", "SLURM_JOB_ID")


def epoch(environ: Mapping[str, str]) -> Setting[int] | None:
    """Returns how often the launcher has restarted the processes; None where it does not say."""
    restarts = optional_integer(environ, "TORCHELASTIC_RESTART_COUNT")
    return found("epoch", restarts, "TORCHELASTIC_RESTART_COUNT") or found(
        "epoch", _of_task(environ, "SLURM_RESTART_COUNT"), "SLURM_RESTART_COUNT"
    )


def store_address(environ: Mapping[str, str]) -> Setting[StoreAddress] | None:
    """Returns where torch's store of this job listens; None where no launcher says it.

    Raises:
        ConfigurationError: a value is unusable.
    """
    address = found("store", environ.get("MASTER_ADDR") or None, "MASTER_ADDR") or _first_of_step(environ)
    port = optional_integer(environ, "MASTER_PORT")
    if port is None:
        port = step_port(environ)
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
    if local is not None:
        return local == processes
    if processes == 1:
        return True
    nodes = _of_task(environ, "SLURM_STEP_NUM_NODES")
    return (_of_task(environ, "SLURM_NNODES") if nodes is None else nodes) == 1


def find_process_group() -> ProcessGroup | None:
    """Returns torch's default process group; None while it is not initialised."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    return ProcessGroup(distributed.get_rank(), distributed.get_world_size())


def merged(
    size: Setting[int] | None, rank: Setting[int] | None, group: ProcessGroup
) -> tuple[Setting[int], Setting[int]]:
    """Returns size and rank: those of the process group where neither an argument nor a launcher gives them.

    Raises:
        ConfigurationError: a launcher of several processes says something else than the process group.
    """
    in_group = Setting("world_size", group.size, PROCESS_GROUP), Setting("rank", group.rank, PROCESS_GROUP)
    if size and size.source != ARGUMENT and size.value == 1 < group.size:
        # The launcher has started one process, and that has started the others.
        return in_group[0], rank if rank and rank.source == ARGUMENT else in_group[1]
    for launched, grouped in zip((size, rank), in_group, strict=True):
        if launched and launched.source != ARGUMENT and launched.value != grouped.value:
            raise ConfigurationError(
                f"{launched.name}: expected the same from the launcher and from torch's process group, got "
                f"{launched.value} ({launched.source}) and {grouped.value}; pass rank and world_size"
            )
    return size or in_group[0], rank or in_group[1]


def step_port(environ: Mapping[str, str]) -> int | None:
    """Returns a port for the step that srun has started; two jobs on one host rarely get the same."""
    number = _of_task(environ, "SLURM_JOB_ID")
    if number is None:
        return None
    return FIRST_PORT + (number + STEP_STRIDE * integer(environ, "SLURM_STEP_ID", 0)) % PORTS


def first_host(listed: str) -> str:
    """Returns the first name of a list of hosts as SLURM writes it.

    Brackets are a shorthand: "node[01-04,07]" means node01 to node04 and node07, so the first is node01.

    Raises:
        ConfigurationError: the text is not such a list.
    """
    found = _FIRST_NAME.match(listed)
    name = _NUMBERS.sub(r"\1", found[0]) if found else ""
    follows = listed[found.end() :] if found else ""
    if not name or "[" in name or follows[:1] not in {"", ","}:
        raise ConfigurationError(
            f"SLURM_STEP_NODELIST: expected hosts such as node[01-04,07] or a,b, got {listed!r:.80}; "
            "set MASTER_ADDR to the host of task 0"
        )
    return name


def _is_task(environ: Mapping[str, str]) -> bool:
    """Whether srun has started this process."""
    return bool(environ.get("SLURM_STEP_NUM_TASKS") and environ.get("SLURM_PROCID"))


def _of_task(environ: Mapping[str, str], variable: str) -> int | None:
    return optional_integer(environ, variable) if _is_task(environ) else None


def _first_of_step(environ: Mapping[str, str]) -> Setting[str] | None:
    """The first host of the step, where task 0 runs."""
    listed = environ.get("SLURM_STEP_NODELIST")
    return Setting("store", first_host(listed), "SLURM_STEP_NODELIST") if listed and _is_task(environ) else None


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
    tasks, nodes = _of_task(environ, "SLURM_STEP_NUM_TASKS"), optional_integer(environ, "SLURM_NNODES")
    # A task may be told to train alone; that is no mistake.
    is_alone = given == 1 and integer(environ, "RANK", -1) == 0
    if tasks is None or nodes != given or tasks <= given or is_alone:
        return ""
    return f"SLURM_NNODES={nodes}, SLURM_STEP_NUM_TASKS={tasks}"
