"""``kvgraft demo``: move a conversation from one model to another, and measure it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgraft.cli.options import DTYPE, add_pair, describe
from kvgraft.errors import ArgumentError, KvgraftError

if TYPE_CHECKING:
    from kvgraft.demo.run import Answer, Demo, Timing
    from kvgraft.evaluate.arms import ArmResult
    from kvgraft.mapper.mapper import Mapper
    from kvgraft.models.loading import LoadedModel

__all__ = ["add_options", "run"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvgraft demo``."""
    describe(
        parser,
        "Move a conversation between two models, and measure the cost. Without arguments: "
        "offline, with a small trained pair that ships with the package. With --source and "
        "--target: with your own models.",
        "  kvgraft demo",
        "  kvgraft demo --source Qwen/Qwen2.5-1.5B-Instruct \\",
        "    --target Qwen/Qwen2.5-0.5B-Instruct",
    )
    add_pair(parser, required=False)
    parser.add_argument(
        "--mapper",
        metavar="PATH",
        help="mapper artifact; without one, a quick one is fitted on bundled text",
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="conversation to map (default: a bundled one)"
    )
    parser.add_argument("--question", metavar="TEXT", help="what to ask afterwards")
    for name, default, text in (
        ("--prefix", 512, "tokens before the scored part"),
        ("--scored", 128, "tokens scored per document"),
        ("--max-tokens", 32, "tokens of each reply"),
    ):
        parser.add_argument(
            name, type=int, default=default, metavar="N", help=f"{text} (default: %(default)s)"
        )
    parser.add_argument(
        "--documents",
        type=int,
        metavar="N",
        help="documents scored (default: 8, or 4 with your own models)",
    )
    parser.add_argument("--dtype", **DTYPE)


def run(args: argparse.Namespace) -> int:
    """Load, map, ask, measure, print."""
    own = args.source is not None or args.target is not None
    if own and (args.source is None or args.target is None):
        raise ArgumentError("Give both --source and --target, or neither for the bundled pair.")
    if args.mapper is not None and not own:
        raise ArgumentError("--mapper goes with --source and --target.")

    source, target = _load_pair(args, own)
    mapper = _load_mapper(args, own, source, target)
    from kvgraft.demo.run import Demo

    demo = Demo(source, target, mapper)
    _print_pair(source, target, mapper)
    conversation = _conversation(args, own)
    context = list(source.tokenizer.encode(conversation.context))
    timing = demo.time_switch(context, repeats=1 if own else 3)
    _print_timing(timing)
    print("\nContinuing from there (greedy)")
    answers = []
    for question, expected in conversation.questions:
        tokens = list(source.tokenizer.encode(question, add_special_tokens=False))
        answers.append(demo.ask(context, tokens, question, expected, args.max_tokens))
        _print_answer(answers[-1])
    _print_right(answers)
    _score(args, demo, own)
    return 0


def _load_pair(args: argparse.Namespace, own: bool) -> tuple[LoadedModel, LoadedModel]:
    from kvgraft.demo.data import bundled
    from kvgraft.models.handle import choose_dtype
    from kvgraft.models.loading import check_tokenizers, load_model

    names = (args.source, args.target) if own else ("models/large", "models/small")
    loaded = []
    for name in names:
        model = load_model(name if own else bundled(name))
        dtype = choose_dtype(args.dtype)
        if dtype is not None:
            model.model.set_dtype(dtype)
        loaded.append(model)
    check_tokenizers(loaded[0].tokenizer, loaded[1].tokenizer)
    return loaded[0], loaded[1]


def _load_mapper(
    args: argparse.Namespace, own: bool, source: LoadedModel, target: LoadedModel
) -> Mapper:
    from kvgraft.demo.data import bundled
    from kvgraft.mapper.mapper import open_mapper
    from kvgraft.mapper.pair import check_pair

    if own and args.mapper is None:
        return _quick_fit(source, target)
    mapper = open_mapper(args.mapper if own else bundled("mapper"))
    check_pair(mapper, source_model=source.identity(), target_model=target.identity())
    return mapper


def _quick_fit(source: LoadedModel, target: LoadedModel) -> Mapper:
    from kvgraft.demo.data import bundled
    from kvgraft.fit import FitConfig, TextSource, fit_mapper
    from kvgraft.progress import bar

    print(
        "No --mapper given: fitting a quick one (24 sequences of 512 tokens). `kvgraft fit` on "
        "your own text gives a better one.",
        flush=True,
    )
    config = FitConfig(sequences=24, seq_len=512, stride=1, k=4)
    text = [TextSource(bundled("text/calibration_novels.txt"))]
    with bar("fitting", "sequence") as progress:
        return fit_mapper(source, target, text, config, progress=progress)


def _conversation(args: argparse.Namespace, own: bool) -> Any:
    from kvgraft.demo.data import Conversation, documents

    if args.text is not None:
        try:
            context = args.text.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise KvgraftError(f"Cannot read {args.text}: {error}") from error
        return Conversation(context, ((args.question or "\n", None),))
    if own:
        context = documents("heldout_novels")[0][:6000]
        return Conversation(context, ((args.question or "", None),))
    bundled = Conversation.bundled()
    if args.question is None:
        return bundled
    return Conversation(bundled.context, ((args.question, None),))


def _print_pair(source: LoadedModel, target: LoadedModel, mapper: Mapper) -> None:
    import mlx.core as mx
    from mlx.utils import tree_flatten

    for role, loaded, geometry in (
        ("source", source, mapper.source),
        ("target", target, mapper.target),
    ):
        leaves: Any = tree_flatten(loaded.model.parameters())  # type: ignore[no-untyped-call]
        size = sum(p.size for _, p in leaves)
        layer = geometry.layers[0]
        print(
            f"{role}  {Path(loaded.name).name}: {size / 1e6:.1f} M parameters, "
            f"{len(geometry.layers)} layers, {layer.n_kv_heads} KV heads x {layer.key_dim}"
        )
    names = {"plan": "head mapping", "k": "k", "rows": "rows"}
    facts = ", ".join(f"{name} {mapper.fit[k]}" for k, name in names.items() if k in mapper.fit)
    print(f"mapper  {mapper.n_parameters / 1e6:.2f} M parameters ({facts or 'unknown fit'})")
    verdict = mapper.quality.verdict
    print(f"verdict {verdict if verdict else 'never evaluated (kvgraft eval)'}")
    print(f"device  {mx.default_device()}", flush=True)


def _print_timing(timing: Timing) -> None:
    print(f"\nHand-off of {timing.n_tokens} tokens")
    print(f"  prefill by the source              {timing.source_prefill:8.3f} s")
    print(f"  mapping its cache                  {timing.mapping:8.3f} s")
    print(
        f"  re-prefill by the target           {timing.target_prefill:8.3f} s"
        f"   ({timing.ratio:.1f} x the mapping)",
        flush=True,
    )


def _print_answer(answer: Answer) -> None:
    print(
        f"\n  {answer.question.strip()!r}"
        + (f"   (right: {answer.expected})" if answer.expected else "")
    )
    for name, reply in answer.replies.items():
        # The next line would be the model asking itself another question.
        line = reply.strip().split("\n")[0]
        print(f"    {name:22s} {line}", flush=True)


def _print_right(answers: list[Answer]) -> None:
    """How many answers were right, by arm; nothing where no answer is known."""
    known = [answer for answer in answers if answer.expected]
    if not known:
        return
    counts = {name: sum(answer.right(name) for answer in known) for name in known[0].replies}
    print(f"\nRight answers of {len(known)}")
    for name, count in counts.items():
        print(f"  {name:22s} {count}")


def _score(args: argparse.Namespace, demo: Demo, own: bool) -> None:
    from kvgraft.demo.data import documents, windows
    from kvgraft.demo.run import conclusions
    from kvgraft.progress import bar

    count = args.documents or (4 if own else 8)
    length = args.prefix + args.scored
    parts = ["heldout_novels"] if own else ["heldout_stories", "heldout_novels"]
    chosen = []
    for part in parts:
        chosen += windows(
            documents(part), demo.source.tokenizer, length, max(1, count // len(parts))
        )
    print(
        f"\nHeld-out text: loss of {args.scored} tokens after {args.prefix}, "
        f"{len(chosen)} documents, nats per token"
    )
    with bar("scoring", "document") as progress:
        arms = demo.score(chosen, args.prefix, progress)
    _print_arms(arms)
    print()
    for line in conclusions(arms):
        print(line)


def _print_arms(arms: dict[str, ArmResult]) -> None:
    from kvgraft.evaluate.arms import MAPPED, NATIVE

    for name, arm in arms.items():
        extra = ""
        if name == MAPPED:
            gap, error = arm.gap(arms[NATIVE])
            extra = f"   {gap:+.3f} ± {error:.3f} against its own cache"
        print(f"  {name:22s} {arm.nll:6.3f}   perplexity {arm.perplexity:8.2f}{extra}")
