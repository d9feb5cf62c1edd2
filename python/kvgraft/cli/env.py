"""``kvgraft env``: what is installed and which kernels are used."""

from __future__ import annotations

import argparse
import json

__all__ = ["add_options", "run"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvgraft env``."""
    parser.description = "Show versions, device and kernels, for bug reports."
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--selftest",
        action="store_true",
        help="compare every kernel with the reference; takes about a minute",
    )


def run(args: argparse.Namespace) -> int:
    """Print the report; with ``--selftest``, 1 if a kernel is wrong."""
    from kvgraft.ops import env

    if args.selftest:
        from kvgraft.ops import selftest

        return selftest.main(["--json"] if args.json else [])
    report = env.report()
    print(json.dumps(report, indent=2) if args.json else env.format_report(report))
    return 0
