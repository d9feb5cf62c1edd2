"""``kvgraft fit``: a mapper for a pair of models, from text."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import warnings
from typing import TYPE_CHECKING, Any

from kvgraft.cli.formatter import HelpFormatter
from kvgraft.cli.sizes import memory_size

if TYPE_CHECKING:
    from kvgraft.fit import FitConfig

__all__ = ["add_options", "add_parser", "config_of"]


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "fit",
        help="fit a mapper for a pair of models",
        description="Fit a mapper that turns SOURCE's cache into TARGET's, and save it.",
        formatter_class=HelpFormatter,
    )
    add_options(parser, needs_text=True).add_argument(
        "--out", required=True, help="folder of the mapper"
    )
    parser.add_argument(
        "--resume",
        dest="work",
        metavar="FOLDER",
        help="keep the state here, and go on from it after an interruption",
    )
    parser.set_defaults(command=run)


def add_options(parser: argparse.ArgumentParser, *, needs_text: bool) -> Any:
    """Add what ``kvgraft fit`` and ``kvgraft plan`` have in common."""
    need = parser.add_argument_group("what to fit")
    need.add_argument("--source", required=True, help="model that reads (folder or repository)")
    need.add_argument("--target", required=True, help="model that goes on")
    need.add_argument(
        "--text",
        required=needs_text,
        nargs="+",
        metavar="TEXT[=WEIGHT]",
        help="calibration text: plain, JSONL or Parquet files, or hf:OWNER/NAME for a dataset; mix "
        "domains that you will use",
    )
    how = parser.add_argument_group("how")
    how.add_argument(
        "--k",
        type=_k,
        default="auto",
        help="source layers per target layer, 'all', or 'auto': selected by the target's loss on "
        "held-out text",
    )
    how.add_argument("--k-values", type=_k, help="the same for values only")
    how.add_argument(
        "--head-mapping",
        choices=["auto", "full", "local", "grouped"],
        default="auto",
        help="source KV heads per target KV head; 'auto' selects like --k",
    )
    how.add_argument(
        "--layer-ranking",
        choices=["heldout", "paper"],
        default="heldout",
        help="how source layers are ranked",
    )
    how.add_argument(
        "--source-layers",
        choices=["shared", "separate"],
        default="shared",
        help="the same source layers for keys and values, or each its own",
    )
    how.add_argument(
        "--lambda",
        dest="ridge_lambda",
        type=_lambda,
        default=0.01,
        help="ridge λ, or 'auto': for each layer the one that explains held-out text best",
    )
    how.add_argument(
        "--lambda-convention",
        choices=["gram", "covariance"],
        default="gram",
        help="what λ is added to",
    )
    how.add_argument(
        "--weight-format",
        choices=["float32", "float16", "bfloat16", "8bit", "4bit"],
        default="float16",
        help="how the weights are stored",
    )
    how.add_argument(
        "--tune-steps",
        type=int,
        default=0,
        help="steps of tuning the map on the target's predictions (96 is a good number)",
    )
    how.add_argument("--tune-batch", type=int, default=8, help="documents per step of tuning")
    how.add_argument("--tune-rate", type=float, default=0.003, help="size of a step of tuning")
    text = parser.add_argument_group("text")
    text.add_argument("--sequences", type=int, default=500, help="sequences to read")
    text.add_argument("--seq-len", type=int, default=1024, help="tokens per sequence")
    text.add_argument("--stride", type=int, default=4, help="take every n-th token")
    text.add_argument("--skip", type=int, default=0, help="leave out the first tokens (sinks)")
    text.add_argument(
        "--token-weights",
        choices=["auto", "attention", "uniform"],
        default="auto",
        help="let tokens that the target attends to count for more ('auto': where it can be "
        "instrumented), or all alike",
    )
    text.add_argument("--heldout", type=float, default=0.1, help="share of sequences held out")
    text.add_argument(
        "--chat", action="store_true", help="apply the chat template to JSONL messages"
    )
    text.add_argument("--documents", type=int, default=8, help="held-out sequences scored on")
    text.add_argument(
        "--prefix", type=int, help="their tokens that are handed over (default: 768, or 3/4)"
    )
    cost = parser.add_argument_group("memory and time")
    cost.add_argument("--memory-limit", type=memory_size, metavar="SIZE", help="such as 12G")
    cost.add_argument(
        "--sequential",
        action="store_true",
        help="never hold both models at once; rows wait on disk",
    )
    return need


def config_of(args: argparse.Namespace) -> FitConfig:
    """The settings that the options of :func:`add_options` stand for."""
    from kvgraft.fit import FitConfig

    names = (
        "k k_values head_mapping layer_ranking source_layers ridge_lambda lambda_convention "
        "weight_format sequences seq_len stride skip token_weights heldout chat documents prefix "
        "tune_steps tune_batch tune_rate memory_limit sequential"
    ).split()
    return FitConfig(**{name: getattr(args, name) for name in names})


def run(args: argparse.Namespace) -> int:
    """Fit, save, say what came of it."""
    from kvgraft.cli.interrupt import terminate_as_interrupt
    from kvgraft.errors import QualityWarning
    from kvgraft.fit import fit, parse_source
    from kvgraft.fit.diagnostics import doubts
    from kvgraft.progress import bar

    config = config_of(args)
    what = args.source, args.target, [parse_source(t) for t in args.text], args.out, config
    group = _processes()
    if group is not None and group.rank() > 0:  # the first one speaks for all
        with terminate_as_interrupt():
            fit(*what, work=args.work, group=group)
        return 0
    with terminate_as_interrupt(), bar("fitting", "step") as progress, warnings.catch_warnings():
        # Said at the end instead, where it is read.
        warnings.simplefilter("ignore", QualityWarning)
        try:
            mapper = fit(*what, work=args.work, progress=progress, notify=_note, group=group)
        except KeyboardInterrupt:
            if args.work is not None and os.path.isdir(args.work):
                _note(f"the same command goes on from {args.work}.")
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
        "R2 does not tell how well the target goes on from a mapped cache. Measure it:\n"
        f"  {evaluation} --text HELDOUT.txt"
    )
    for line in doubts(mapper):
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


def _k(text: str) -> int | str:
    if text in ("all", "auto"):
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number nor 'all' or 'auto'"
        ) from None


def _lambda(text: str) -> float | str:
    if text == "auto":
        return text
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor 'auto'") from None
