"""The scenarios between network namespaces, and a table of the results; `scripts/test netns` runs it."""

import argparse
import sys
from collections.abc import Sequence

from chaos.chaos_world import Finding
from netns.netns_scenarios import SCENARIOS
from netns.netns_world import reason_to_skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/test netns",
        description="Runs a server and members in separate network namespaces, and cuts the wire between them. "
        "Seconds are from the fault to the end of the run, or until all reachable members reported the loss.",
    )
    parser.add_argument("--only", choices=SCENARIOS, help="one scenario")
    options = parser.parse_args(arguments)
    if reason := reason_to_skip():
        print(f"skipped: {reason}")
        return 0
    print(f"{'scenario':36} {'seconds':>8} {'packets':>8} {'dropped':>8} {'bit-identical':>14}")
    findings = 0
    for name in [options.only] if options.only else SCENARIOS:
        try:
            result = SCENARIOS[name]()
        except Finding as finding:
            findings += 1
            print(f"{name:36} FOUND: {finding}", flush=True)
            continue
        identical = "-" if result.identical is None else "yes"
        print(f"{name:36} {result.seconds:>8.1f} {result.packets:>8} {result.dropped:>8} {identical:>14}", flush=True)
    return int(findings > 0)


if __name__ == "__main__":
    sys.exit(main())
