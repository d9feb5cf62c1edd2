"""``kvgraft eval``: measure a mapper on held-out text, judge it, write a report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvgraft.cli.options import DTYPE, RESUME, add_fields, add_pair, config_of, describe

__all__ = ["BELOW", "add_options", "run"]

BELOW = 3
"""Exit status when the verdict is below ``--fail-below``."""

_WHAT: dict[str, str | Mapping[str, Any]] = {
    "documents": "documents to score",
    "prefix": "tokens before the scored part, mapped except for the last",
    "scored": "tokens scored after them",
    "native_starts": "native starts to try: first tokens that the target reads itself",
    "native_ends": "native ends to try: last tokens that the target reads itself, with the one to "
    "continue from",
    "needle_lengths": {"help": "contexts to hide facts in; give none to skip", "nargs": "*"},
    "needle_depths": "where facts are hidden, 0 to 1",
    "needle_samples": "facts per length and depth",
    "speed_lengths": {"help": "tokens to time mapping at; give none to skip", "nargs": "*"},
    "repeats": "timed runs, of which the median counts",
    "seed": "seed of needles, random map and confidence intervals",
    "dtype": DTYPE,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvgraft eval``."""
    from kvgraft.evaluate import EvalConfig

    describe(
        parser,
        "Measure how much of the context the target keeps with a mapped cache, on held-out text. "
        "Recommends native start and end, writes a report, and stores the verdict in the "
        "artifact.",
        "  kvgraft eval my-mapper --source Qwen/Qwen2.5-1.5B-Instruct \\",
        "    --target Qwen/Qwen2.5-0.5B-Instruct --text heldout.txt",
    )
    parser.add_argument("mapper", metavar="MAPPER", help="mapper artifact")
    add_pair(parser)
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
    parser.add_argument(
        "--chat", action="store_true", help="apply the chat template to JSONL messages"
    )
    out = parser.add_argument_group("results")
    out.add_argument(
        "--out", metavar="FOLDER", help="folder of the report (default: eval in the artifact)"
    )
    out.add_argument(
        "--no-write", action="store_true", help="do not change the artifact; report only"
    )
    out.add_argument(
        "--fail-below",
        choices=["warning", "ship"],
        help=f"exit with status {BELOW} if the verdict is worse; 'warning' accepts 'ship with "
        "warning'",
    )
    out.add_argument("--resume", **RESUME)
    add_fields(parser.add_argument_group("what to measure"), EvalConfig(), _WHAT)


def run(args: argparse.Namespace) -> int:
    """Measure, judge, write, print."""
    from kvgraft.cli.interrupt import terminate_as_interrupt
    from kvgraft.evaluate import EvalConfig, evaluate_mapper
    from kvgraft.evaluate.output import can_draw, default_folder, is_writable_artifact
    from kvgraft.evaluate.report import NO_FIGURES
    from kvgraft.progress import bar

    path = Path(args.mapper)
    stored = not args.no_write and is_writable_artifact(path)
    with terminate_as_interrupt(), bar("evaluating", "step") as progress:
        found = evaluate_mapper(
            path,
            args.source,
            args.target,
            args.text,
            config_of(EvalConfig, args),
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
        print(f"stored   verdict and recommended native start and end in {path}")
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
    print(f"\nadvice   native start {policy['head']}, native end {policy['tail']}")
    verdict = results["verdict"]
    print(f"verdict  {verdict['level'].upper()}")
    for line in (*verdict["reasons"], *verdict["notes"]):
        print(f"  - {line}")
