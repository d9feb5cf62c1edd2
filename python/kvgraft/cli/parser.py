"""One module per subcommand; each adds its parser and runs."""

from __future__ import annotations

import argparse

__all__ = ["build_parser"]


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``kvgraft`` with all subcommands."""
    from kvgraft import __version__
    from kvgraft.cli import (
        convert,
        demo,
        env,
        eval,
        fit,
        generate,
        inspect,
        plan,
        serve,
        transfer,
        verify,
    )

    parser = argparse.ArgumentParser(
        prog="kvgraft",
        description="Hand a running conversation from one language model to another.",
    )
    parser.add_argument("--version", action="version", version=f"kvgraft {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in (demo, fit, eval, generate, transfer, serve, plan, inspect, verify, convert, env):
        module.add_parser(subparsers)
    return parser
