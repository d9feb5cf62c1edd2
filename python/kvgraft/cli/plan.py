"""``kvgraft plan``: memory, disk and time of a fit, before it is run."""

from __future__ import annotations

import argparse

from kvgraft.cli.fit import add_fit_options
from kvgraft.cli.options import config_of, describe

__all__ = ["add_options", "run"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvgraft plan``."""
    describe(
        parser,
        "Print memory, disk and time of `kvgraft fit` with the same options. Both models are "
        "loaded, one after the other, to read one sequence. Nothing is written.",
        "  kvgraft plan --source Qwen/Qwen2.5-1.5B-Instruct \\",
        "    --target Qwen/Qwen2.5-0.5B-Instruct --memory-limit 12G",
    )
    add_fit_options(parser, needs_text=False)


def run(args: argparse.Namespace) -> int:
    """Print the forecast."""
    from kvgraft.fit import FitConfig, forecast, parse_source

    text = None if args.text is None else [parse_source(t) for t in args.text]
    found = forecast(args.source, args.target, text, config_of(FitConfig, args))
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
