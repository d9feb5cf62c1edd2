"""``kvgraft fit``: fit a mapper for a pair of models on text."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from kvgraft.cli.options import RESUME, add_fields, add_pair, config_of, describe, memory_size

__all__ = ["add_fit_options", "add_options", "run"]

_METHOD = {
    "k": "source layers per target layer; 'auto' selects the number by the target's loss on "
    "held-out text",
    "k_values": "the same for values only (default: as --k)",
    "head_mapping": "source KV heads per target KV head: all, the one of the same index, or one "
    "group each; 'auto' selects by loss as --k does",
    "layer_ranking": "rank source layers by R2 on held-out text, or in-sample as in the paper",
    "source_layers": "the same source layers for keys and values, or separate ones",
    "ridge_lambda": "ridge λ; 'auto' takes the best on held-out text for each layer",
    "lambda_convention": "add λ to the Gram matrix or to the covariance",
    "weight_format": "how weights are stored",
    "tune_steps": "steps of tuning on the target's predictions after the closed form; 96 is a "
    "good number",
    "tune_batch": "documents per tuning step",
    "tune_rate": "size of a tuning step, as a share of the features' spread",
}
_TEXT = {
    "sequences": "sequences to read",
    "seq_len": "tokens per sequence",
    "stride": "use every N-th token",
    "skip": "leave out the first N tokens of each sequence, its attention sinks",
    "token_weights": "weight tokens by the attention they receive, or all alike; 'auto': by "
    "attention if the target can be instrumented",
    "heldout": "share of the sequences that is held out",
    "chat": "apply the chat template to JSONL messages",
    "documents": "held-out sequences that 'auto' compares losses on",
    "prefix": "tokens of each that are mapped; the rest is scored (default: 768, or 3/4 of a "
    "shorter sequence)",
}
_COST: dict[str, str | Mapping[str, Any]] = {
    "memory_limit": {
        "help": "use at most this much memory, such as 12G, models included",
        "type": memory_size,
        "metavar": "SIZE",
    },
    "sequential": "load one model at a time; the source's rows wait on disk",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvgraft fit``."""
    describe(
        parser,
        "Fit a mapper that turns caches of the source model into caches of the target model, and "
        "save it. Stored scores are those of held-out sequences.",
        "  kvgraft fit --source Qwen/Qwen2.5-1.5B-Instruct \\",
        "    --target Qwen/Qwen2.5-0.5B-Instruct --text prose.txt --out my-mapper",
    )
    add_fit_options(parser, needs_text=True).add_argument(
        "--out", required=True, metavar="FOLDER", help="folder of the mapper"
    )
    parser.add_argument("--resume", **RESUME)


def add_fit_options(parser: argparse.ArgumentParser, *, needs_text: bool) -> Any:
    """Add what ``kvgraft fit`` and ``kvgraft plan`` have in common."""
    from kvgraft.fit import FitConfig

    defaults = FitConfig(k="auto", head_mapping="auto")
    pair = parser.add_argument_group("what to fit")
    add_pair(pair)
    pair.add_argument(
        "--text",
        required=needs_text,
        nargs="+",
        metavar="TEXT[=WEIGHT]",
        help="calibration text: plain, JSONL or Parquet files, or hf:OWNER/NAME for a dataset; mix "
        "the domains that you will use",
    )
    for title, table in (("method", _METHOD), ("text", _TEXT), ("memory", _COST)):
        add_fields(parser.add_argument_group(title), defaults, table)
    return pair


def run(args: argparse.Namespace) -> int:
    """Fit, save, report."""
    from kvgraft.cli.interrupt import terminate_as_interrupt
    from kvgraft.errors import QualityWarning
    from kvgraft.fit import FitConfig, fit, parse_source
    from kvgraft.fit.diagnostics import quality_warnings
    from kvgraft.progress import bar

    config = config_of(FitConfig, args)
    what = args.source, args.target, [parse_source(t) for t in args.text], args.out, config
    group = _processes()
    if group is not None and group.rank() > 0:  # only the first reports
        with terminate_as_interrupt():
            fit(*what, work=args.work, group=group)
        return 0
    with terminate_as_interrupt(), bar("fitting", "step") as progress, warnings.catch_warnings():
        # Printed at the end instead, where it is seen.
        warnings.simplefilter("ignore", QualityWarning)
        try:
            mapper = fit(*what, work=args.work, progress=progress, notify=_note, group=group)
        except KeyboardInterrupt:
            if args.work is not None and os.path.isdir(args.work):
                _note(f"the same command continues from {args.work}.")
            raise
    print(f"Wrote {args.out}: {mapper.describe()}")
    for name in ("keys", "values"):
        scores = [m.scores[f"r2_{name}"] for m in mapper.layers]
        print(
            f"  held-out R2 of the {name}: mean {sum(scores) / len(scores):.3f}, "
            f"lowest {min(scores):.3f} (layer {scores.index(min(scores))})"
        )
        exact = mapper.fit.get(f"mean_r2_{name}_unrounded")
        if exact is not None:
            lost = exact - sum(scores) / len(scores)
            print(
                f"    {config.weight_format} weights cost {lost:.3f} of it "
                f"({exact:.3f} before rounding)"
            )
    evaluation = shlex.join(
        ["kvgraft", "eval", args.out, "--source", args.source, "--target", args.target]
    )
    print(
        "R2 does not measure how well the target continues from a mapped cache. Evaluate it:\n"
        f"  {evaluation} --text HELDOUT.txt"
    )
    for line in quality_warnings(mapper):
        print(f"kvgraft: warning: {line}", file=sys.stderr)
    return 0


def _processes() -> Any:
    """The processes that ``mlx.launch`` or ``mpirun`` started together, or ``None``."""
    if not {"MLX_RANK", "OMPI_COMM_WORLD_RANK"} & os.environ.keys():
        return None
    import mlx.core as mx

    group = mx.distributed.init()
    return group if group.size() > 1 else None


def _note(line: str) -> None:
    from tqdm import tqdm

    tqdm.write(f"note: {line}")
