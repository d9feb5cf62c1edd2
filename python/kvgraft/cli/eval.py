"""``kvgraft eval``: what a mapper is worth, measured, judged and reported."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgraft.cli.formatter import HelpFormatter

if TYPE_CHECKING:
    from kvgraft.evaluate.results import EvalConfig

__all__ = ["BELOW", "add_parser", "config_of"]

BELOW = 3
"""Exit status when the verdict is below ``--fail-below``."""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "eval",
        help="measure a mapper on held-out text, and judge it",
        description=(
            "Measure what MAPPER's caches are worth on held-out text, choose how many tokens the "
            "target should read itself, write a report, and store verdict and policy in the "
            "artifact."
        ),
        formatter_class=HelpFormatter,
    )
    parser.add_argument("mapper", metavar="MAPPER", help="mapper artifact")
    parser.add_argument("--source", required=True, help="model that reads (folder or repository)")
    parser.add_argument("--target", required=True, help="model that goes on")
    parser.add_argument(
        "--text",
        required=True,
        nargs="+",
        metavar="FILE",
        help="held-out text: plain, JSONL or Parquet",
    )
    parser.add_argument(
        "--calibration",
        nargs="+",
        default=[],
        metavar="FILE",
        help="text that the mapper was fitted on, if the artifact has no fingerprints of it",
    )
    out = parser.add_argument_group("results")
    out.add_argument(
        "--out", metavar="FOLDER", help="where the report goes (default: eval in the artifact)"
    )
    out.add_argument(
        "--no-write", action="store_true", help="leave the artifact as it is; report only"
    )
    out.add_argument(
        "--fail-below",
        choices=["warning", "ship"],
        help=f"exit with status {BELOW} if the verdict is worse: 'warning' lets 'ship with "
        "warning' pass",
    )
    out.add_argument(
        "--resume",
        dest="work",
        metavar="FOLDER",
        help="keep the state here, and go on from it after an interruption",
    )
    what = parser.add_argument_group("what to measure")
    what.add_argument("--documents", type=int, default=16, help="documents to score")
    what.add_argument("--prefix", type=int, default=768, help="tokens that are handed over")
    what.add_argument("--scored", type=int, default=256, help="tokens scored after them")
    what.add_argument(
        "--native-starts",
        type=int,
        nargs="+",
        default=[0, 4, 32],
        help="native tokens to try at the start",
    )
    what.add_argument(
        "--native-ends",
        type=int,
        nargs="+",
        default=[1, 32, 128],
        help="native tokens to try at the end",
    )
    what.add_argument(
        "--needle-lengths",
        type=int,
        nargs="*",
        default=[512, 1024],
        help="contexts to hide facts in; nothing for none",
    )
    what.add_argument(
        "--needle-depths",
        type=float,
        nargs="+",
        default=[0.1, 0.3, 0.5, 0.7, 0.9],
        help="where facts are hidden, 0 to 1",
    )
    what.add_argument("--needle-samples", type=int, default=2, help="facts per length and depth")
    what.add_argument(
        "--speed-lengths",
        type=int,
        nargs="*",
        default=[256, 512, 1024, 2048],
        help="tokens to time at; nothing for none",
    )
    what.add_argument("--repeats", type=int, default=3, help="timed runs")
    what.add_argument("--seed", type=int, default=0, help="of needles, random map and intervals")
    what.add_argument("--chat", action="store_true", help="render JSONL chats with the template")
    what.add_argument(
        "--dtype",
        choices=["float32", "float16", "bfloat16"],
        help="run the models in this dtype (default: float32 without a GPU, as stored with one)",
    )
    parser.set_defaults(command=run)


def config_of(args: argparse.Namespace) -> EvalConfig:
    """The settings that the options stand for."""
    from kvgraft.evaluate.results import EvalConfig

    return EvalConfig(
        documents=args.documents,
        prefix=args.prefix,
        scored=args.scored,
        native_starts=tuple(args.native_starts),
        native_ends=tuple(args.native_ends),
        needle_lengths=tuple(args.needle_lengths),
        needle_depths=tuple(args.needle_depths),
        needle_samples=args.needle_samples,
        speed_lengths=tuple(args.speed_lengths),
        repeats=args.repeats,
        seed=args.seed,
        dtype=args.dtype,
    )


def run(args: argparse.Namespace) -> int:
    """Measure, judge, write, print."""
    from kvgraft.cli.interrupt import terminate_as_interrupt
    from kvgraft.evaluate.output import can_draw, default_folder, is_writable_artifact
    from kvgraft.evaluate.report import NO_FIGURES
    from kvgraft.evaluate.run import evaluate_mapper
    from kvgraft.progress import bar

    path = Path(args.mapper)
    stored = not args.no_write and is_writable_artifact(path)
    with terminate_as_interrupt(), bar("evaluating", "step") as progress:
        found = evaluate_mapper(
            path,
            args.source,
            args.target,
            args.text,
            config_of(args),
            store=stored,
            out=args.out or default_folder(path, stored),
            calibration=args.calibration,
            chat=args.chat,
            work=args.work,
            progress=progress,
        )
    if not stored and not args.no_write:
        print(
            f"kvgraft: {path} is not in kvgraft's format, so the verdict is only in the report. "
            "`kvgraft convert` makes it one.",
            file=sys.stderr,
        )
    if not can_draw():
        print(f"kvgraft: {NO_FIGURES}", file=sys.stderr)
    _print(found.results)
    print(f"\nreport   {found.files[0]}")
    print(f"         {found.files[1].name} and {found.files[2].name} beside it")
    if stored:
        print(f"stored   verdict and policy in {path}")
    wanted = {"warning": "ship with warning", "ship": "ship", None: None}[args.fail_below]
    return BELOW if wanted is not None and found.verdict.below(wanted) else 0


def _print(results: dict[str, Any]) -> None:
    from kvgraft.evaluate import arms

    print(f"{results['mapper']['summary']}\n")
    text = results["text"]
    settings = results["settings"]
    print(
        f"{text['documents']} documents, {settings['scored']} tokens each after a prefix of "
        f"{settings['prefix']}"
    )
    print(f"  {'':42s} {'loss':>7s} {'gap':>8s}  {'95 % interval':17s} agrees")
    for name, arm in results["arms"].items():
        nll, gap = arm["nll"], arm["gap"]
        if nll[0] is None:
            print(f"  {name:42s} not finite")
            continue
        span = "" if name == arms.NATIVE else f"{gap[1]:+.3f} to {gap[2]:+.3f}"
        print(
            f"  {name:42s} {nll[0]:7.3f} {gap[0]:+8.3f}  {span:17s} {100 * arm['agreement']:4.0f} %"
        )
    policy = results["policy"]
    print(f"\npolicy   {policy['head']} native tokens at the start, {policy['tail']} at the end")
    verdict = results["verdict"]
    print(f"verdict  {verdict['level'].upper()}")
    for line in (*verdict["reasons"], *verdict["notes"]):
        print(f"  - {line}")
