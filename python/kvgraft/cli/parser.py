"""The parser of ``kvgraft``: one module per command."""

from __future__ import annotations

import argparse
from importlib import import_module

__all__ = ["COMMANDS", "build_parser"]

COMMANDS = {
    "demo": "move a conversation between two models and measure the cost",
    "fit": "fit a mapper for a pair of models",
    "eval": "evaluate a mapper on held-out text",
    "generate": "generate text, and switch models on the way",
    "transfer": "map a prompt-cache file of mlx-lm from one model to another",
    "serve": "mlx_lm.server that maps caches when a conversation changes the model",
    "plan": "memory, disk and time of a fit, before it is run",
    "inspect": "describe a mapper, a prompt-cache file, or a model's cache",
    "verify": "check a mapper's files against their SHA-256",
    "convert": "store a mapper in another weight format, or in VeloxQuant-MLX's format",
    "env": "show versions, device and kernels, for bug reports",
}
"""Each is a module beside this one, with ``add_options(parser)`` and ``run(args)``."""


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser of ``kvgraft``.

    Args:
        command: The command whose options are wanted. Others are listed only: to import
            all of their modules takes seconds.
    """
    from kvgraft import __version__

    parser = argparse.ArgumentParser(
        prog="kvgraft",
        description="Hand a running conversation from one language model to another.",
    )
    parser.add_argument("--version", action="version", version=f"kvgraft {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        its = subparsers.add_parser(
            name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name == command:
            module = import_module(f"kvgraft.cli.{name}")
            module.add_options(its)
            its.set_defaults(command=module.run)
    return parser
