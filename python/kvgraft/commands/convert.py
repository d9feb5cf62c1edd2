"""``kvgraft convert``: other weights, or another program's format."""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["add_parser"]


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "convert", help="rewrite a mapper with other weights, or in VeloxQuant-MLX's format"
    )
    parser.add_argument("mapper", help="artifact to read: kvgraft's or VeloxQuant-MLX's")
    parser.add_argument("out", help="folder to write")
    parser.add_argument(
        "--to", choices=["kvgraft", "veloxquant"], default="kvgraft", help="(default: kvgraft)"
    )
    parser.add_argument(
        "--weights",
        choices=["float32", "float16", "bfloat16", "8bit", "4bit"],
        help="store weights so; only for kvgraft's format (default: as they are)",
    )
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Read, convert, write."""
    from kvgraft import artifact
    from kvgraft.errors import FormatError
    from kvgraft.formats import veloxquant

    mapper = artifact.load(args.mapper)
    if args.to == "veloxquant":
        if args.weights is not None:
            raise FormatError("--weights goes with kvgraft's own format; leave it out.")
        out = veloxquant.export_veloxquant(mapper, args.out)
    else:
        out = artifact.save(mapper, args.out, weights=args.weights)
    print(f"Wrote {out}")
    return 0
