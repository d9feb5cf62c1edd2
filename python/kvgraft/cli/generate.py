"""``kvgraft generate``: a reply that one model begins and another continues."""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgraft.cli.options import (
    DTYPE,
    FORCE,
    NATIVE,
    add_fields,
    add_pair,
    config_of,
    describe,
    memory_size,
)
from kvgraft.errors import ArgumentError
from kvgraft.option_names import option_name

if TYPE_CHECKING:
    from kvgraft.handoff import Observation, Policy, Session, SessionOptions

__all__ = ["add_options", "run"]


_SWITCH: dict[str, str | Mapping[str, Any]] = {
    **NATIVE,
    "repair": {
        "help": "after the switch, also prefill N tokens natively per generated one, until the "
        "mapped cache can be replaced by a native one; 64 without a number",
        "nargs": "?",
        "const": 64,
    },
    "memory_limit": {
        "help": "most memory that MLX may hold, such as 12G; a switch that does not fit is refused",
        "type": memory_size,
        "metavar": "SIZE",
    },
    "keep_source": "keep the source model in memory after the switch",
    "force": FORCE,
}
_SAMPLING = {
    "temp": (float, 0.0, "temperature; 0 is greedy"),
    "top_p": (float, 0.0, "nucleus sampling; 0 is off"),
    "top_k": (int, 0, "top-k sampling; 0 is off"),
    "min_p": (float, 0.0, "min-p sampling; 0 is off"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvgraft generate``."""
    from kvgraft.handoff import SessionOptions

    describe(
        parser,
        "Begin a reply with the source model and continue it with the target model. The text goes "
        "to stdout, the switch and its cost to stderr. Only one of the models is in memory at a "
        "time.",
        "  kvgraft generate --source Qwen/Qwen2.5-1.5B-Instruct \\",
        "    --target Qwen/Qwen2.5-0.5B-Instruct --mapper my-mapper --switch-after 100 \\",
        "    --prompt 'Write a short story about a lighthouse.'",
    )
    add_pair(parser)
    parser.add_argument(
        "--mapper",
        metavar="PATH",
        help="mapper for the pair; without one, the target re-prefills the conversation",
    )
    parser.add_argument("--dtype", **DTYPE)
    text = parser.add_argument_group("text")
    text.add_argument(
        "--prompt", "-p", required=True, metavar="TEXT", help="the message; - reads it from stdin"
    )
    text.add_argument("--system-prompt", metavar="TEXT", help="system message")
    text.add_argument(
        "--ignore-chat-template", action="store_true", help="do not apply the chat template"
    )
    text.add_argument(
        "--max-tokens",
        "-m",
        type=int,
        default=256,
        metavar="N",
        help="tokens of the reply (default: %(default)s)",
    )
    for name, (kind, default, about) in _SAMPLING.items():
        text.add_argument(
            option_name(name),
            type=kind,
            default=default,
            metavar="N" if kind is int else "X",
            help=f"{about} (default: %(default)s)",
        )
    text.add_argument(
        "--repetition-penalty",
        type=float,
        metavar="X",
        help="penalty of repeated tokens (default: none)",
    )
    text.add_argument("--seed", type=int, metavar="N", help="seed of the sampling")
    switch = parser.add_argument_group("switch")
    switch.add_argument(
        "--switch-after",
        type=int,
        metavar="N",
        help="switch after N tokens of the reply; 0 has the source only prefill the prompt "
        "(default: 32; with --memory-limit, when memory gets short)",
    )
    add_fields(switch, SessionOptions(), _SWITCH)


def run(args: argparse.Namespace) -> int:
    """Generate, and report on stderr."""
    import mlx.core as mx

    _check(args)
    # Its messages are printed from the reports.
    logging.getLogger("kvgraft.handoff").addHandler(logging.NullHandler())
    logging.getLogger("kvgraft.handoff").propagate = False
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if args.seed is not None:
        mx.random.seed(args.seed)
    session = _session(args)
    if args.switch_after == 0:
        session.use("target")
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
    if args.switch_after is not None and args.switch_after < 0:
        raise ArgumentError(f"--switch-after must be 0 or more, not {args.switch_after}.")
    if args.seed is not None and not 0 <= args.seed < 1 << 64:
        raise ArgumentError(f"--seed must be from 0 to 2^64 - 1, not {args.seed}.")
    _check_sampling(args)


def _check_sampling(args: argparse.Namespace) -> None:
    # Written so that NaN is refused too.
    if not 0 <= args.temp < math.inf:
        raise ArgumentError(f"--temp must be 0 or more, not {args.temp}.")
    for name, value in (("--top-p", args.top_p), ("--min-p", args.min_p)):
        if not 0 <= value <= 1:
            raise ArgumentError(f"{name} must be from 0 to 1, not {value}.")
    if args.top_k < 0:
        raise ArgumentError(f"--top-k must be 0 or more, not {args.top_k}.")
    penalty = args.repetition_penalty
    if penalty is not None and not 0 < penalty < math.inf:
        raise ArgumentError(f"--repetition-penalty must be above 0, not {penalty}.")


def _session(args: argparse.Namespace) -> Session:
    from kvgraft.handoff import Session
    from kvgraft.mapper.mapper import open_mapper
    from kvgraft.models.handle import ModelHandle, choose_dtype
    from kvgraft.models.loading import resolve_model

    # Before any model is loaded: a wrong option or path should not cost a minute.
    options = _options(args)
    mappers = {} if args.mapper is None else {("source", "target"): open_mapper(args.mapper)}
    folders = {"source": resolve_model(args.source), "target": resolve_model(args.target)}
    if args.top_k:
        _check_top_k(args.top_k, list(folders.values()))
    dtype = choose_dtype(args.dtype)
    models = {name: ModelHandle(folder, dtype=dtype) for name, folder in folders.items()}
    return Session(models, mappers, options)


def _options(args: argparse.Namespace) -> SessionOptions:
    from mlx_lm.sample_utils import make_logits_processors, make_sampler

    from kvgraft.handoff import MemoryLimit, SessionOptions

    return config_of(
        SessionOptions,
        args,
        system=args.system_prompt,
        chat_template=not args.ignore_chat_template,
        sampler=make_sampler(temp=args.temp, top_p=args.top_p, min_p=args.min_p, top_k=args.top_k),
        logits_processors=make_logits_processors(repetition_penalty=args.repetition_penalty),
        memory_limit=None if args.memory_limit is None else MemoryLimit(args.memory_limit),
        policy=_policy(args),
    )


def _check_top_k(top_k: int, folders: Sequence[Path]) -> None:
    """Refuse what mlx-lm's sampler would fail on at the first token."""
    for folder in folders:
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # loading the model reports what is wrong with it
        size = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
        if isinstance(size, int) and top_k >= size:
            raise ArgumentError(
                f"--top-k must be below the {size} tokens of {folder.name}'s vocabulary, not "
                f"{top_k}."
            )


def _policy(args: argparse.Namespace) -> Policy:
    from kvgraft.handoff import memory_policy

    after = args.switch_after
    if after is None and args.memory_limit is not None:
        return memory_policy()

    def after_tokens(seen: Observation) -> str | None:
        due = seen.steps_since_switch >= (32 if after is None else after)
        return "target" if due and not seen.has_switched else None

    return after_tokens
