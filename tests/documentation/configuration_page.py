"""Writer of docs/configuration.md, for `scripts/docs write`.

Flags come from the server's parsers, ranges from its quota, arguments from the signature and the docstring of
`client.connect`, and variables from every lookup in the client. Only the meaning of variables is written here.
"""

import argparse
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import fields
from unittest import mock

import client
from server import __main__ as command_line
from server.config import Parser, parser
from server.security.quota import Quota
from statsd_bn.errors import AuthenticationRefused, BindError, ConfigurationError, ServerUnreachable
from support.contract_interface import variables_of
from support.paths import ROOT

PAGE = ROOT / "docs" / "configuration.md"

CLIENT_VARIABLES = {
    "GROUP_RANK": 'the host\'s number, for the group "local"; torchrun sets it',
    "LOCAL_RANK": "the process's number on its host; where it is set, WORLD_SIZE counts processes",
    "LOCAL_WORLD_SIZE": 'number of processes on this host, for the group "local"; torchrun sets it',
    "MASTER_ADDR": "name or address of rank 0's host, for jobs without an endpoint",
    "MASTER_PORT": "port of torch's rendezvous store on rank 0's host",
    "PET_NNODES": "Kubeflow's number of hosts; shows whether WORLD_SIZE counts hosts",
    "PET_NPROC_PER_NODE": "Kubeflow's number of processes on each host",
    "RANK": "`rank`",
    "SLURM_JOB_ID": "`job`, with SLURM_STEP_ID; the port of the rendezvous store derives from both",
    "SLURM_NNODES": "number of hosts, if SLURM_STEP_NUM_NODES is not set",
    "SLURM_PROCID": "`rank` of a task of srun, if RANK is not set",
    "SLURM_RESTART_COUNT": "epoch of a task of srun, if TORCHELASTIC_RESTART_COUNT is not set",
    "SLURM_STEP_ID": "see SLURM_JOB_ID",
    "SLURM_STEP_NODELIST": "hosts of a step; the first is the default of MASTER_ADDR",
    "SLURM_STEP_NUM_NODES": "number of hosts of a step",
    "SLURM_STEP_NUM_TASKS": "`world_size` of srun's tasks, if WORLD_SIZE is not set",
    "STATSD_BN_CURVE": "`curve`",
    "STATSD_BN_ENDPOINT": "`endpoint`",
    "STATSD_BN_INSECURE": "1: TCP without a key, for a server with `--insecure`; `status` and `view` read it too",
    "STATSD_BN_JOB": "`job`",
    "STATSD_BN_LOG_LEVEL": "debug, info, warning or error: level of the client's log (default: that of `logging`) "
    "and of rank 0's server (default: warning)",
    "STATSD_BN_NATIVE": "0: turns the native core off; default 1; read once",
    "STATSD_BN_ON_NONFINITE": "`on_nonfinite`",
    "STATSD_BN_SECRET": "the job's secret itself; excludes STATSD_BN_SECRET_FILE",
    "STATSD_BN_SECRET_FILE": "file with the secret of a job on several hosts without an endpoint, made by `python -m "
    "server secret`",
    "STATSD_BN_STACKS": "0: this process does not report its stack; default 1",
    "STATSD_BN_TRACEBACK": "full: tracebacks show all frames of the client, by default only one",
    "STATSD_BN_TRANSPORT": "`transport`",
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

This page is for you if you need a flag, argument or environment variable. `scripts/docs write` makes it from the
code.

`statsd-bn serve` is `python -m server`, and `statsd-bn status`, `check`, `report`, `view`, `keygen` and `secret` are
its commands. In a folder with a `server.py` of your own only `statsd-bn` works."""

FLAGS = """## python -m server

A flag takes precedence over its variable (in brackets), and the variable over the default."""

LIMITS = """### Limits

A request beyond a limit gets an error, and the status counts it ([security.md](security.md)). Each limit is a flag,
such as `--max-groups 4`, and a variable, such as `STATSD_BN_MAX_GROUPS=4`."""

CONNECT = """## client.connect

An argument takes precedence over a variable."""

VARIABLES = """## Variables that the client reads

`client.connect` warns of a misspelt name."""


def page() -> str:
    parts = (
        HEAD,
        FLAGS,
        _flags(parser({}), but=_limits()),
        LIMITS,
        _list(map(_limit, fields(Quota))),
        *_commands(),
        "### Exit codes",
        _list(_exit_codes()),
        CONNECT,
        _list(_arguments()),
        VARIABLES,
        _list(_variables()),
    )
    return "\n\n".join(parts) + "\n"


def _flags(of: argparse.ArgumentParser, but: Iterable[str] = ()) -> str:
    """A flag's help names its variable and its default."""
    actions = [action for action in of._actions if not isinstance(action, argparse._HelpAction)]
    rows = ((f"`{_call(action)}`", action.help or "") for action in actions if _name(action) not in but)
    return _list(rows)


def _call(action: argparse.Action) -> str:
    value = action.metavar or ("{" + ",".join(action.choices) + "}" if action.choices else "")
    return f"{_name(action)} {value}".strip() if action.option_strings else value


def _name(action: argparse.Action) -> str:
    return action.option_strings[0] if action.option_strings else action.dest


def _limits() -> list[str]:
    return [f"--{option.name.replace('_', '-')}" for option in fields(Quota)]


def _limit(option: object) -> tuple[str, str]:
    least, most, reason = (option.metadata[name] for name in ("least", "most", "reason"))
    default, low, high = (f"{value:.15g}" for value in (option.default, least, most))
    return f"`--{option.name.replace('_', '-')}`", f"{reason}; default {default}, from {low} to {high}"


def _commands() -> Iterator[str]:
    """Sections of the commands; `serve` has the flags of `python -m server`, and a shared flag is described once."""
    described: dict[str, str] = {}
    for name in sorted(command_line.COMMANDS.keys() - {"serve"}):
        of = _parser_of(command_line.COMMANDS[name])
        lines = []
        for line in _flags(of).splitlines():
            first = described.setdefault(line, name)
            lines.append(line if first == name else f"{line.partition(': ')[0]}: as for `{first}`")
        yield f"### python -m server {name}\n\n{of.description}\n\n" + "\n".join(lines)


class _Made(Exception):
    """Carries the parser out of a command."""


def _parser_of(command: object) -> argparse.ArgumentParser:
    def stop(self: argparse.ArgumentParser, *_: object) -> None:
        raise _Made(self)

    with mock.patch.object(Parser, "parse_args", stop):
        try:
            command([])
        except _Made as made:
            return made.args[0]
    raise AssertionError(f"expected that {command} parses its arguments, but it does not")


def _exit_codes() -> Iterator[tuple[str, str]]:
    for error, code in sorted(command_line.EXIT_CODES.items(), key=lambda item: item[1]):
        yield f"{code}", f"{EXIT_CODES[error]} (`{error.__name__}`)"


def _arguments() -> Iterator[tuple[str, str]]:
    arguments = re.search(r"^Args:\n(.*?)\n\n", inspect.getdoc(client.connect), re.MULTILINE | re.DOTALL)[1]
    texts = dict(re.findall(r"^    (\w+): (.*?)(?=^    \w+: |\Z)", arguments, re.MULTILINE | re.DOTALL))
    for name, parameter in inspect.signature(client.connect).parameters.items():
        default = "" if parameter.default is None else f" (default `{parameter.default!r}`)"
        yield f"`{name}`{default}", " ".join(texts[name].split())


def _variables() -> Iterator[tuple[str, str]]:
    for name in sorted(variables_of("client")):
        if name not in CLIENT_VARIABLES:
            raise KeyError(f"the client reads {name}: say in CLIENT_VARIABLES of {__file__} what it means")
        yield f"`{name}`", CLIENT_VARIABLES[name]


def _list(items: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"- {name}: {text}" for name, text in items)


if __name__ == "__main__":
    PAGE.write_text(page())
