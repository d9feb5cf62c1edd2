"""``kvgraft env``: what is installed and which paths are taken."""

from __future__ import annotations

import argparse
import json
from typing import Any

__all__ = ["add_parser"]


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "env", help="show versions, device and fused paths, for bug reports"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--selftest",
        action="store_true",
        help="then run the kernels against the reference, about a minute",
    )
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Print the report; with ``--selftest``, 1 if a kernel is wrong."""
    from kvgraft.ops import env

    if args.selftest:
        from kvgraft.ops import selftest

        return selftest.main(["--json"] if args.json else [])
    report = env.report()
    print(json.dumps(report, indent=2) if args.json else env.format_report(report))
    return 0
