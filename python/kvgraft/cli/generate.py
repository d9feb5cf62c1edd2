"""``kvgraft generate``: text from one model that another goes on with."""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgraft.cli.sizes import memory_size
from kvgraft.errors import ArgumentError

if TYPE_CHECKING:
    from kvgraft.handoff import MemoryLimit, Observation, Policy, Session
    from kvgraft.models.handle import ModelHandle

__all__ = ["add_parser"]


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "generate",
        help="generate text, and switch models on the way",
        description="The first model begins the reply, the second goes on with it. The text goes "
        "to stdout; the switch and what it cost go to stderr. Only one of the models is in "
        "memory at a time.",
    )
    parser.add_argument("--source", required=True, help="model that begins (folder or repository)")
    parser.add_argument("--target", required=True, help="model that goes on")
    parser.add_argument(
        "--mapper", help="mapper from the first to the second; without one, the text is read again"
    )
    parser.add_argument(
        "--switch-after",
        type=int,
        metavar="N",
        help="switch after N tokens of the reply; 0 to let the first model only read the prompt "
        "(default: 32, or with --memory-limit when memory gets short)",
    )
    parser.add_argument("--prompt", "-p", required=True, help="the message; - reads it from stdin")
    parser.add_argument("--system-prompt", help="system message for the chat template")
    parser.add_argument(
        "--ignore-chat-template", action="store_true", help="give the prompt as it is"
    )
    parser.add_argument(
        "--max-tokens", "-m", type=int, default=256, help="tokens of the reply (default: 256)"
    )
    parser.add_argument("--temp", type=float, default=0.0, help="temperature (default: 0, greedy)")
    parser.add_argument("--top-p", type=float, default=0.0, help="nucleus sampling (default: off)")
    parser.add_argument("--top-k", type=int, default=0, help="top-k sampling (default: off)")
    parser.add_argument("--min-p", type=float, default=0.0, help="min-p sampling (default: off)")
    parser.add_argument(
        "--repetition-penalty", type=float, help="penalty of repeated tokens (default: none)"
    )
    parser.add_argument("--seed", type=int, help="seed of the random sequence")
    parser.add_argument(
        "--native-start", type=int, help="first tokens that the second model reads itself "
        "(default: the mapper's policy)",
    )  # fmt: skip
    parser.add_argument(
        "--native-end",
        type=int,
        help="last tokens that it reads itself (default: the mapper's policy)",
    )
    parser.add_argument(
        "--repair", type=int, nargs="?", const=64, default=0, metavar="N",
        help="after the switch also read N tokens per generated one, until the mapped cache can "
        "be replaced by a native one (default: off; 64 without a number)",
    )  # fmt: skip
    parser.add_argument(
        "--memory-limit", type=memory_size, metavar="SIZE",
        help="most that MLX may hold, such as 12G: a switch that does not fit is refused",
    )  # fmt: skip
    parser.add_argument(
        "--keep-source", action="store_true",
        help="keep the first model in memory during the switch",
    )  # fmt: skip
    parser.add_argument(
        "--force", action="store_true", help='use a mapper whose verdict is "do not ship"'
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "float16", "bfloat16"],
        help="run the models in this dtype (default: float32 without a GPU, as stored with one)",
    )
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Generate, and report on stderr."""
    import mlx.core as mx

    _check(args)
    # What it would say is printed from the reports.
    logging.getLogger("kvgraft.handoff").addHandler(logging.NullHandler())
    logging.getLogger("kvgraft.handoff").propagate = False
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if args.seed is not None:
        mx.random.seed(args.seed)
    session = _session(args)
    if args.switch_after == 0:
        session.use("to")
    seen = 0
    for piece in session.chat(prompt, max_tokens=args.max_tokens, read_first=True):
        print(piece, end="", flush=True)
        switches = session.turns[-1].switches
        if len(switches) > seen:
            seen = len(switches)
            print(f"\n[{switches[-1].describe()}]", file=sys.stderr, flush=True)
    print()
    turn = session.turns[-1]
    for report in turn.switches[seen:]:
        print(f"[{report.describe()}]", file=sys.stderr)
    if not turn.switches:
        print(f"[no switch: {turn.generated} tokens were generated before it]", file=sys.stderr)
    for event in turn.events:
        print(f"[{event}]", file=sys.stderr)
    print(
        f"[{turn.generated} tokens in {turn.seconds:.2f} s, the first after "
        f"{turn.seconds_to_first:.2f} s; cache: {turn.native} native, {turn.mapped} mapped]",
        file=sys.stderr,
    )
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.max_tokens < 1:
        raise ArgumentError("--max-tokens must be at least 1.")
    for name in ("switch_after", "native_start", "native_end"):
        value = getattr(args, name)
        if value is not None and value < 0:
            raise ArgumentError(f"--{name.replace('_', '-')} is a number of tokens, not {value}.")
    if args.repair == 1 or args.repair < 0:
        raise ArgumentError("--repair must be at least 2, to gain on the generation.")
    if args.seed is not None and not 0 <= args.seed < 1 << 64:
        raise ArgumentError(f"--seed is a number from 0 to 2^64 - 1, not {args.seed}.")
    _check_sampling(args)


def _check_sampling(args: argparse.Namespace) -> None:
    # Written so that NaN is refused too.
    if not 0 <= args.temp < math.inf:
        raise ArgumentError(f"--temp is a number from 0 up, not {args.temp}.")
    for name, value in (("--top-p", args.top_p), ("--min-p", args.min_p)):
        if not 0 <= value <= 1:
            raise ArgumentError(f"{name} is a probability, 0 to 1, not {value}.")
    if args.top_k < 0:
        raise ArgumentError(f"--top-k is a number of tokens, not {args.top_k}.")
    penalty = args.repetition_penalty
    if penalty is not None and not 0 < penalty < math.inf:
        raise ArgumentError(f"--repetition-penalty is a number above 0, not {penalty}.")


def _session(args: argparse.Namespace) -> Session:
    from mlx_lm.sample_utils import make_logits_processors, make_sampler

    from kvgraft.handoff import Session
    from kvgraft.models.loading import resolve_model

    # It is opened before any model is: a wrong path should not cost a minute.
    mapper = None if args.mapper is None else _open(args.mapper)
    folders = resolve_model(args.source), resolve_model(args.target)
    if args.top_k:
        _check_top_k(args.top_k, folders)
    models = {n: _handle(f, args.dtype) for n, f in zip(("from", "to"), folders, strict=True)}
    return Session(
        models,
        {} if mapper is None else {("from", "to"): mapper},
        system=args.system_prompt,
        chat_template=not args.ignore_chat_template,
        sampler=make_sampler(temp=args.temp, top_p=args.top_p, min_p=args.min_p, top_k=args.top_k),
        logits_processors=make_logits_processors(repetition_penalty=args.repetition_penalty),
        memory_limit=_memory_limit(args.memory_limit),
        policy=_policy(args),
        head=args.native_start,
        tail=args.native_end,
        force=args.force,
        keep_source=args.keep_source,
        repair=args.repair,
    )


def _open(path: str) -> Any:
    from kvgraft.mapper.mapper import open_mapper

    return open_mapper(path)


def _check_top_k(top_k: int, folders: Sequence[Path]) -> None:
    """Refuse what mlx-lm's sampler would fail on at the first token."""
    for folder in folders:
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # loading the model says what is wrong with it
        size = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
        if isinstance(size, int) and top_k >= size:
            raise ArgumentError(
                f"--top-k must be below the {size} tokens of {folder.name}'s vocabulary, not "
                f"{top_k}."
            )


def _handle(folder: Path, dtype: str | None) -> ModelHandle:
    from kvgraft.models.handle import ModelHandle, choose_dtype

    return ModelHandle(folder, dtype=choose_dtype(dtype))


def _memory_limit(limit: int | None) -> MemoryLimit | None:
    from kvgraft.handoff import MemoryLimit

    return None if limit is None else MemoryLimit(limit)


def _policy(args: argparse.Namespace) -> Policy:
    from kvgraft.handoff import memory_policy

    after = args.switch_after
    if after is None and args.memory_limit is not None:
        return memory_policy()

    def after_tokens(seen: Observation) -> str | None:
        due = seen.steps_since_switch >= (32 if after is None else after)
        return "to" if due and not seen.has_switched else None

    return after_tokens
