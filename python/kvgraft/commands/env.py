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
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    from kvgraft import env

    report = env.report()
    print(json.dumps(report, indent=2) if args.json else env.format_report(report))
    return 0
