"""Counts what the kernel loads, stores and multiplies for real pairs of models.

    PYTHONPATH=python python tests/metal/traffic.py

The emulator counts the bytes of every load and store. The counts of one tile
grow linearly with the source layers, so two small runs give those of any number
of layers; tiles and tokens multiply them. Prints the tables of
docs/performance.md: the counts, and what follows from them for Apple's chips.
"""

# ruff: noqa: E402 - the helpers lie beside this script
from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "helpers"), str(Path(__file__).parent)]

from emulator import Library
from map_layer import DIRECTORY, SOURCE, run

from kvgraft.models.rope import RopeSpec
from kvgraft.ops.cases import Case, build

# name: source heads, head_dim; target heads, head_dim; layers k; head plan
PAIRS = {
    "Qwen2.5 3B to 1.5B": ((2, 128), (2, 128), 16, "full"),
    "Qwen2.5 1.5B to 0.5B": ((2, 128), (2, 64), 16, "full"),
    "Qwen3 0.6B to 1.7B": ((8, 128), (8, 128), 8, "full"),
    "Qwen3 0.6B to 1.7B, local": ((8, 128), (8, 128), 8, "local"),
    "Llama 3.1 8B to 70B, local": ((8, 128), (8, 128), 20, "local"),
}
TOKENS = 2048
# float32 TFLOP/s and GB/s as published. M5: MLX's own matmul there, at half of the
# 15 TFLOP/s that its matrix units are said to reach in float16.
CHIPS = {
    "M1": (2.6, 68),
    "M2 Max": (13.6, 400),
    "M3 Max": (14.2, 400),
    "M4 Max": (17.0, 546),
    "M5": (7.5, 153),
}


def composed_bytes(source: tuple[int, int], target: tuple[int, int], k: int, plan: str) -> int:
    """What MLX's own operations read and write for one layer's keys, in float16.

    Per value of the product's input: widen (2, 4), two products and a sum for each half
    of a pair (20), three copies (join the halves, heads side by side, join the layers;
    in a head plan a fourth, the gather), and the product's own read (4). Per weight:
    widen (2, 4), reorder (8), read (4). Per value of the result: write (4), bias (8),
    turn (28), limit (8) and narrow (6).
    """
    width = 1 if plan == "local" else source[0]
    spread = target[0] if plan == "local" else 1  # each target head has an input of its own
    inputs = TOKENS * k * width * source[1] * spread
    per_input = 6 + 20 + 8 * 3 + 4 + (8 if plan == "local" else 0)
    weights = k * width * source[1] * target[0] * target[1]
    return inputs * per_input + weights * 18 + TOKENS * target[0] * target[1] * 54


def tile_counts(source: tuple[int, int], dim: int, layers: int, plan: str) -> list[float]:
    """Source, weight, table, result and threadgroup bytes and matrix products of one tile."""
    rope = RopeSpec(128, base=1e6)
    heads = (1, 128) if plan == "local" else source
    case = Case("traffic", tokens=64, sources=(heads,) * layers, target=(1, dim), strip=(rope,),
                rotate=RopeSpec(dim, base=1e6), plan="full")  # fmt: skip
    _, (r,) = run(library, build(case), (64, 64))
    tiles = dim // 64
    read = r.read_bytes
    return [
        x / tiles
        for x in (
            sum(read[12:28]), read[2], sum(read[6:10]), r.written_bytes[0],
            r.threadgroup_traffic, r.multiplications,
        )
    ]  # fmt: skip


def main() -> None:
    print(
        "| pair | k | MFLOP | loads from L1/L2, MB: keys, weights, tables | from memory at "
        "least, MB | FLOP per loaded byte | threadgroup bytes per FLOP |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|")
    roofs = []
    for name, (source, target, k, plan) in PAIRS.items():
        one, two = (tile_counts(source, target[1], n, plan) for n in (1, 2))
        per = [a + (k - 1) * (b - a) for a, b in zip(one, two, strict=True)]
        tiles = TOKENS // 64 * target[0] * target[1] // 64
        keys, weights, tables, result, shared, products = (x * tiles for x in per)
        flop = products * 1024
        in_dim = k * source[1] * (1 if plan == "local" else source[0])
        least = 2 * (TOKENS * k * source[0] * source[1] + in_dim * target[0] * target[1]
                     + TOKENS * target[0] * target[1])  # fmt: skip
        print(
            f"| {name} | {k} | {flop / 1e6:.0f} | {keys / 1e6:.0f}, {weights / 1e6:.0f}, "
            f"{tables / 1e6:.1f} | {least / 1e6:.1f} | "
            f"{flop / (keys + weights + tables + result):.0f} | {shared / flop:.3f} |",
            flush=True,
        )
        plain = composed_bytes(source, target, k, plan)
        cells = []
        for chip, (tflops, bandwidth) in CHIPS.items():
            compute = flop / tflops / 1e9
            near, far = (b / bandwidth / 1e6 for b in (least, least + 3 * 2 * TOKENS * k
                                                       * source[0] * source[1]))  # fmt: skip
            if chip == "M5":
                near = far = plain / bandwidth / 1e6
            bound = "compute" if compute > far else "memory" if compute < near else "either"
            span = f"{near:.2f}" if near == far else f"{near:.2f} to {far:.2f}"
            cells.append(f"{compute:.2f} / {span}, {bound}")
        roofs.append(f"| {name} | {' | '.join(cells)} |")
    print()
    print(f"| pair | {' | '.join(CHIPS)} |")
    print("|---|" + "--:|" * len(CHIPS))
    print("\n".join(roofs))


if __name__ == "__main__":
    library = Library(SOURCE.read_text(), DIRECTORY, only=["map_layer_tile_64x64"])
    main()
