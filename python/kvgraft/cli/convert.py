"""``kvgraft convert``: another weight format, or VeloxQuant-MLX's artifact format."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraft.cli.options import describe

if TYPE_CHECKING:
    from kvgraft.mapper.mapper import Mapper
    from kvgraft.ops.quantized import Weight

__all__ = ["add_options", "run"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvgraft convert``."""
    from kvgraft.mapper.save import WEIGHT_FORMATS

    describe(
        parser,
        "Store a mapper in another weight format, or in VeloxQuant-MLX's artifact format.",
        "  kvgraft convert my-mapper my-mapper-8bit --weight-format 8bit",
    )
    parser.add_argument(
        "mapper", metavar="MAPPER", help="artifact to read: kvgraft's or VeloxQuant-MLX's"
    )
    parser.add_argument("out", metavar="OUT", help="folder to write")
    parser.add_argument(
        "--to",
        choices=["kvgraft", "veloxquant"],
        default="kvgraft",
        help="artifact format (default: %(default)s)",
    )
    parser.add_argument(
        "--weight-format",
        choices=WEIGHT_FORMATS,
        help="how weights are stored, in kvgraft's own format (default: as they are)",
    )


def run(args: argparse.Namespace) -> int:
    """Read, convert, write."""
    from kvgraft.errors import FormatError
    from kvgraft.mapper import veloxquant
    from kvgraft.mapper.mapper import open_mapper
    from kvgraft.mapper.quality import Quality
    from kvgraft.mapper.save import save_mapper

    mapper = open_mapper(args.mapper)
    if Path(args.out).resolve() == Path(args.mapper).resolve():
        raise FormatError(
            f"{args.out} would replace the mapper that it is made from. Choose another."
        )
    if args.to == "veloxquant":
        if args.weight_format is not None:
            raise FormatError("--weight-format goes with kvgraft's own format; leave it out.")
        out = veloxquant.export_veloxquant(mapper, args.out)
    else:
        if args.weight_format in ("8bit", "4bit"):
            mapper.quality = Quality()  # the old one is that of other weights
        out = save_mapper(mapper, args.out, weight_format=args.weight_format)
    print(f"Wrote {out}")
    if args.to == "kvgraft" and args.weight_format in ("8bit", "4bit"):
        for line in _loss(open_mapper(args.mapper), open_mapper(out), args.weight_format):
            print(line)
    return 0


def _loss(before: Mapper, after: Mapper, weights: str) -> list[str]:
    """How much rounding changed the weights, and what was not measured."""
    from kvgraft.ops.quantized import relative_change

    lines = []
    for kind in ("keys", "values"):
        changes = {
            m.target_layer: relative_change(
                _weight(before, m.target_layer, kind), _weight(after, m.target_layer, kind)
            )
            for m in before.layers
        }
        worst = max(changes, key=lambda layer: changes[layer])
        mean = sum(changes.values()) / len(changes)
        lines.append(
            f"  {weights} changes the {kind}' weights by {100 * mean:.2g} % on average, at most "
            f"{100 * changes[worst]:.2g} % (layer {worst})"
        )
    lines.append(
        "  The effect on the target was not measured: scores in the artifact are those of the "
        "original weights, and their verdict is left out. Evaluate the new mapper with "
        "`kvgraft eval`."
    )
    return lines


def _weight(mapper: Mapper, layer: int, kind: str) -> Weight:
    loaded = mapper.read_layer(layer)  # one layer in memory at a time
    weight = (loaded.keys if kind == "keys" else loaded.values).weight
    assert weight is not None
    return weight
