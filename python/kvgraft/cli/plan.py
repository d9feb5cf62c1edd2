"""``kvgraft plan``: what a fit takes, before it is run."""

from __future__ import annotations

import argparse
from typing import Any

from kvgraft.cli.fit import add_options, config_of
from kvgraft.cli.formatter import HelpFormatter

__all__ = ["add_parser"]


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "plan",
        help="memory, disk and time of a fit, before it is run",
        description="Load both models one after the other, read one sequence with each, and say "
        "what `kvgraft fit` with the same options (but --out and --resume) takes. Nothing is "
        "written.",
        formatter_class=HelpFormatter,
    )
    add_options(parser, needs_text=False)
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Print the forecast."""
    from kvgraft.fit import forecast, parse_source

    text = None if args.text is None else [parse_source(t) for t in args.text]
    found = forecast(args.source, args.target, text, config_of(args))
    for line in (*found.notes, *found.plan.describe()):
        print(line)
    time = found.time
    print(
        f"time        about {_time(time.total)}: models {_time(time.models)}, moments "
        f"{_time(time.moments)}, solving {_time(time.solve)}"
    )
    print(f"            {found.sequences} sequences; comparing candidates is not counted")
    return 0


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
