"""python -m server: parse, run, exit code."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from server.config import from_arguments
from server.service import run_master
from server.status import CHECK_SECONDS, ask, describe, own_endpoint
from statsd_bn.errors import BindError, ConfigurationError, ServerUnreachable

EXIT_USAGE = 2
EXIT_BIND = 3
EXIT_UNREACHABLE = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code: 0, 2 usage, 3 cannot bind, 4 no server there."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        command = COMMANDS.get(given[0]) if given else None
        return command(given[1:]) if command else _serve(given)
    except ConfigurationError as error:
        return _complain(error, EXIT_USAGE)
    except BindError as error:
        return _complain(error, EXIT_BIND)
    except ServerUnreachable as error:
        return _complain(error, EXIT_UNREACHABLE)


def _serve(arguments: list[str]) -> int:
    config = from_arguments(arguments, os.environ)
    logging.basicConfig(level=config.logging_level, format="%(asctime)s %(levelname)s %(message)s")
    run_master(config)
    return 0


def _status(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m server status", description="Says what a running server is doing.")
    parser.add_argument("endpoint", metavar="ENDPOINT", help="where the server listens")
    print(describe(ask(parser.parse_args(arguments).endpoint)))  # noqa: T201 - the command's result
    return 0


def _check(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m server check",
        description="Exits with 0 if a server answers, with 4 if not; for health checks and probes.",
    )
    parser.add_argument(
        "endpoint",
        metavar="ENDPOINT",
        nargs="?",
        help="where the server listens (default: what STATSD_BN_BIND of this host's server says)",
    )
    ask(parser.parse_args(arguments).endpoint or own_endpoint(os.environ), CHECK_SECONDS)
    return 0


def _complain(error: Exception, code: int) -> int:
    print(f"statsd_bn: {error}", file=sys.stderr)  # noqa: T201 - the command's one-line error
    return code


COMMANDS = {"status": _status, "check": _check}


if __name__ == "__main__":
    sys.exit(main())
