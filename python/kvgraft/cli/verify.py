"""``kvgraft verify``: is this artifact complete and unaltered?"""

from __future__ import annotations

import argparse
import sys

__all__ = ["add_options", "run"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvgraft verify``."""
    parser.description = "Check a mapper's files against their SHA-256."
    parser.add_argument("mapper", metavar="MAPPER", help="artifact: a folder or one .safetensors")


def run(args: argparse.Namespace) -> int:
    """Check every byte; print what was checked."""
    from kvgraft.mapper.verify import verify_artifact

    report = verify_artifact(args.mapper)
    # All of it on one stream, since the report names the errors.
    print(report, file=sys.stdout if report.ok else sys.stderr)
    return 0 if report.ok else 1
