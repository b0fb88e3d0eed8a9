"""SLURM's variables: the rank of a process that srun started, and where torch's store can be.

srun numbers the tasks and says how many its step has. It names no address for a store, so we take the first host of the
step, and a port computed from the job's number. SLURM_STEP_NUM_TASKS tells its tasks apart from the batch script, which
has SLURM_PROCID and SLURM_NTASKS too. https://slurm.schedmd.com/srun.html, "Output environment variables".
"""

import re
from collections.abc import Mapping

from statsd_bn.environment import integer, optional_integer
from statsd_bn.errors import ConfigurationError

# Ports for a step: below those of outgoing connections (32768 and more on Linux), above those of known services.
FIRST_PORT = 15_000
PORTS = 15_000

# Steps of one job may share a host; a prime spreads their ports.
STEP_STRIDE = 101

# The first name of a list: "a,b", "node[01-04,07]", "rack[1-2]node[3,5]-ib".
_FIRST_NAME = re.compile(r"(?:[^\[\],\s]|\[[^\[\]\s]+\])+")
_NUMBERS = re.compile(r"\[([0-9]+)(?:[-,][0-9,-]*)?\]")


def is_task(environ: Mapping[str, str]) -> bool:
    """Returns whether srun has started this process."""
    return bool(environ.get("SLURM_STEP_NUM_TASKS") and environ.get("SLURM_PROCID"))


def rank(environ: Mapping[str, str]) -> int | None:
    """Returns the task's number in its step."""
    return optional_integer(environ, "SLURM_PROCID") if is_task(environ) else None


def tasks(environ: Mapping[str, str]) -> int | None:
    """Returns how many tasks the step has."""
    return optional_integer(environ, "SLURM_STEP_NUM_TASKS") if is_task(environ) else None


def nodes(environ: Mapping[str, str]) -> int | None:
    """Returns on how many hosts the step runs, or the whole job where the step's number is unknown."""
    if not is_task(environ):
        return None
    of_the_step = optional_integer(environ, "SLURM_STEP_NUM_NODES")
    return optional_integer(environ, "SLURM_NNODES") if of_the_step is None else of_the_step


def job(environ: Mapping[str, str]) -> str | None:
    """Returns a name for the run; each step of a job is a run of its own."""
    number = environ.get("SLURM_JOB_ID")
    return f"slurm-{number}.{environ.get('SLURM_STEP_ID', '0')}" if number and is_task(environ) else None


def restarts(environ: Mapping[str, str]) -> int | None:
    """Returns how often SLURM has restarted the job; None if never."""
    return optional_integer(environ, "SLURM_RESTART_COUNT") if is_task(environ) else None


def address(environ: Mapping[str, str]) -> str | None:
    """Returns the first host of the step, where task 0 runs.

    Raises:
        ConfigurationError: the list of hosts cannot be read.
    """
    listed = environ.get("SLURM_STEP_NODELIST")
    return first_host(listed) if listed and is_task(environ) else None


def port(environ: Mapping[str, str]) -> int | None:
    """Returns a port for the step; two jobs on one host rarely get the same."""
    number = optional_integer(environ, "SLURM_JOB_ID") if is_task(environ) else None
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
