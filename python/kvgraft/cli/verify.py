"""``kvgraft verify``: is this artifact whole and unaltered?"""

from __future__ import annotations

import argparse
import sys
from typing import Any

__all__ = ["add_parser"]


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("verify", help="check a mapper's files against their SHA-256")
    parser.add_argument("mapper", help="artifact folder, or one self-describing .safetensors")
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Check every byte; print what was checked."""
    from kvgraft.mapper.verify import verify_artifact

    report = verify_artifact(args.mapper)
    # All of it on one stream: it names the errors, and they are said once.
    print(report, file=sys.stdout if report.ok else sys.stderr)
    return 0 if report.ok else 1
