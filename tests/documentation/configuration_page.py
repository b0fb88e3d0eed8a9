"""Writes docs/configuration.md from the code, for `scripts/docs write`.

Flags come from the server's parsers, ranges from its quota, arguments from the signature and the docstring of
`client.connect`, and variables from wherever the client looks one up. Only what a variable means stands here.
"""

import argparse
import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import fields
from unittest import mock

import client
from server import __main__ as command_line
from server.arguments import Parser
from server.config import parser
from server.security.quota import Quota
from statsd_bn.errors import AuthenticationRefused, BindError, ConfigurationError, ServerUnreachable
from support.paths import ROOT

PAGE = ROOT / "docs" / "configuration.md"

CLIENT_VARIABLES = {
    "GROUP_RANK": 'which of the job\'s hosts this is, for the group "local"; torchrun sets it',
    "LOCAL_RANK": "this process's number on its host; if a launcher sets it, WORLD_SIZE counts processes",
    "LOCAL_WORLD_SIZE": 'how many processes this host has, for the group "local"; torchrun sets it',
    "MASTER_ADDR": "where processes without an endpoint meet: a name or address of rank 0's host",
    "MASTER_PORT": "the port where they meet",
    "PET_NNODES": "Kubeflow's number of hosts; it shows that a WORLD_SIZE counts hosts",
    "PET_NPROC_PER_NODE": "Kubeflow's number of processes on each host",
    "RANK": "`rank`",
    "SLURM_JOB_ID": "`job`, together with SLURM_STEP_ID, and the port where the tasks of srun meet",
    "SLURM_NNODES": "how many hosts a step has, if SLURM_STEP_NUM_NODES is not set",
    "SLURM_PROCID": "`rank`, for a task of srun, where RANK is not set",
    "SLURM_RESTART_COUNT": "the job's epoch, for a task of srun, if TORCHELASTIC_RESTART_COUNT is not set",
    "SLURM_STEP_ID": "see SLURM_JOB_ID",
    "SLURM_STEP_NODELIST": "the hosts of a step; the first takes the place of MASTER_ADDR",
    "SLURM_STEP_NUM_NODES": "how many hosts a step has",
    "SLURM_STEP_NUM_TASKS": "`world_size`, for a task of srun, if WORLD_SIZE is not set",
    "STATSD_BN_CURVE": "`curve`",
    "STATSD_BN_ENDPOINT": "`endpoint`",
    "STATSD_BN_INSECURE": "1: TCP without a key, for a server with `--insecure` in a network that is closed to "
    "strangers; `status` and `view` read it too",
    "STATSD_BN_JOB": "`job`",
    "STATSD_BN_LOG_LEVEL": "debug, info, warning or error, in any case: what the client logs, and the server "
    "that rank 0 starts; by default the client leaves this to `logging`, and the server logs warnings",
    "STATSD_BN_NATIVE": "0: no native core: torch's operators compute on a CPU, and rows travel over the server; "
    "default 1. Read once",
    "STATSD_BN_SECRET": "the job's secret itself, instead of STATSD_BN_SECRET_FILE; it is an error to set both",
    "STATSD_BN_SECRET_FILE": "a file with the job's secret, the same on all its hosts; `python -m server secret` makes "
    "it. For a job on several hosts without an endpoint",
    "STATSD_BN_SECRET_IN_STORE": "1: rank 0 makes the secret and sends it through torch's rendezvous store; anybody "
    "who can reach MASTER_ADDR:MASTER_PORT can read it there",
    "STATSD_BN_TRACEBACK": "full: tracebacks show all frames inside of the client; by default one",
    "STATSD_BN_ON_NONFINITE": "`on_nonfinite`, if that is not given: warn, raise or ignore",
    "STATSD_BN_TRANSPORT": "`transport`, if that is not given: auto, server, shared_memory or process_group",
    "STATSD_BN_STACKS": "0: this process does not tell in which file, line and function it is when others wait for it; "
    "default 1",
    "TORCHELASTIC_RESTART_COUNT": "the job's epoch, default 0; ranks of an older epoch are refused; torchrun sets it",
    "TORCHELASTIC_RUN_ID": "`job`, if STATSD_BN_JOB is not set; torchrun sets it",
    "WORLD_SIZE": "`world_size`",
}

EXIT_CODES = {
    ConfigurationError: "a flag, a variable or a file is wrong",
    BindError: "the server cannot listen there",
    ServerUnreachable: "no server answers there",
    AuthenticationRefused: "the server and the key do not accept each other",
}

HEAD = """# Configuration

Every flag, argument and environment variable. `scripts/docs write` makes this page from the code, and
`tests/documentation/test_configuration_page.py` compares them: change the code, not the page.

The command `statsd-bn` is the same as `python -m server`: `statsd-bn serve` runs the server, and `statsd-bn status`,
`check`, `keygen` and `secret` are the commands below. Without arguments `python -m server` runs the server, and
`statsd-bn` prints its help. In a folder that has a `server.py` only `statsd-bn` runs our server; `python -m server`
would run that file."""

FLAGS = """## python -m server

A flag wins over its variable, whose name is in brackets. The variable wins over the default."""

LIMITS = """### Limits

The server answers a request beyond a limit with an error, and counts it in the status. [security.md](security.md) says
what they are for. Each limit is a flag, such as `--max-jobs 4`, and a variable, such as `STATSD_BN_MAX_JOBS=4`."""

CONNECT = """## client.connect

An argument wins over a variable."""

VARIABLES = """## Variables that the client reads

They take the place of arguments of `client.connect` that you do not give, or have no argument. `client.connect` warns
of a variable that is nearly one of these."""


def page() -> str:
    """Returns the page as the code has it."""
    parts = (
        HEAD,
        FLAGS,
        _flags(parser({}), but=_limits()),
        LIMITS,
        _table(("limit", "default", "from", "to", "what"), map(_limit, fields(Quota))),
        *map(_command, sorted(command_line.COMMANDS)),
        "### Exit codes",
        _table(("code", "error", "what"), _exit_codes()),
        CONNECT,
        _table(("argument", "default", "what"), _arguments()),
        VARIABLES,
        _table(("variable", "what"), _variables()),
    )
    return "\n\n".join(parts) + "\n"


def variables_of(package: str) -> set[str]:
    """Returns the environment variables that a package looks up by a name in its code."""
    trees = (ast.parse(path.read_text()) for path in (ROOT / package).rglob("*.py"))
    return {
        name for tree in trees for call in ast.walk(tree) if isinstance(call, ast.Call) for name in _looked_up(call)
    }


def _looked_up(call: ast.Call) -> list[str]:
    """What is in `environ.get("NAME")`, or in a function's call with an environment and a name."""
    of = [call.func.value] if isinstance(call.func, ast.Attribute) and call.func.attr == "get" else []
    match [*of, *call.args]:
        case [environ, ast.Constant(str(name)), *_] if ast.unparse(environ) in {"environ", "os.environ"}:
            return [name]
    return []


def _flags(of: argparse.ArgumentParser, but: Iterable[str] = ()) -> str:
    """A flag's help names its variable and its default."""
    actions = [action for action in of._actions if not isinstance(action, argparse._HelpAction)]
    rows = ((f"`{_call(action)}`", action.help or "") for action in actions if _name(action) not in but)
    return _table(("argument", "what"), rows)


def _call(action: argparse.Action) -> str:
    value = action.metavar or ("{" + ",".join(action.choices) + "}" if action.choices else "")
    return f"{_name(action)} {value}".strip() if action.option_strings else value


def _name(action: argparse.Action) -> str:
    return action.option_strings[0] if action.option_strings else action.dest


def _limits() -> list[str]:
    return [f"--{option.name.replace('_', '-')}" for option in fields(Quota)]


def _limit(option: object) -> tuple[str, ...]:
    least, most, reason = (option.metadata[name] for name in ("least", "most", "reason"))
    numbers = (f"{value:.15g}" for value in (option.default, least, most))
    return (f"`--{option.name.replace('_', '-')}`", *numbers, reason)


def _command(name: str) -> str:
    of = _parser_of(command_line.COMMANDS[name])
    return f"### python -m server {name}\n\n{of.description}\n\n{_flags(of)}"


class _Made(Exception):
    """Carries the parser out of a command."""


def _parser_of(command: object) -> argparse.ArgumentParser:
    """A command makes its parser and parses at once, so it is stopped there."""

    def stop(self: argparse.ArgumentParser, *_: object) -> None:
        raise _Made(self)

    with mock.patch.object(Parser, "parse_args", stop):
        try:
            command([])
        except _Made as made:
            return made.args[0]
    raise AssertionError(f"expected that {command} parses its arguments, but it does not")


def _exit_codes() -> Iterator[tuple[str, ...]]:
    for error, code in sorted(command_line.EXIT_CODES.items(), key=lambda item: item[1]):
        yield f"{code}", f"`{error.__name__}`", EXIT_CODES[error]


def _arguments() -> Iterator[tuple[str, ...]]:
    said = re.search(r"^Args:\n(.*?)\n\n", inspect.getdoc(client.connect), re.MULTILINE | re.DOTALL)[1]
    texts = dict(re.findall(r"^    (\w+): (.*?)(?=^    \w+: |\Z)", said, re.MULTILINE | re.DOTALL))
    for name, parameter in inspect.signature(client.connect).parameters.items():
        default = "" if parameter.default is None else f"`{parameter.default!r}`"
        yield f"`{name}`", default, " ".join(texts[name].split())


def _variables() -> Iterator[tuple[str, ...]]:
    for name in sorted(variables_of("client")):
        if name not in CLIENT_VARIABLES:
            raise KeyError(f"the client reads {name}: say in CLIENT_VARIABLES of {__file__} what it means")
        yield f"`{name}`", CLIENT_VARIABLES[name]


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = (head, ("---",) * len(head), *rows)
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page())
