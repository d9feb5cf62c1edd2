"""Speculative decoding with a mapped draft cache: acceptance, seconds, equality.

    python -m benchmarks.speculative [--target T --draft D --mapper M] [--json FILE]

Without arguments it runs the bundled pair. Every continuation is compared with
plain greedy decoding of the target. Where one parts, the gap between the
target's two best tokens is printed: with 16-bit weights two tokens can be so
close that reading several at once rounds the other way.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm.generate import generate_step

from kvgraft.demo.data import bundled, documents, windows
from kvgraft.handoff.speculative import acceptance, check_models, draft_cache, speculate
from kvgraft.mapper.mapper import Mapper
from kvgraft.mapper.pair import check_pair
from kvgraft.models.forward import prefill
from kvgraft.models.loading import load_model


@dataclass(frozen=True)
class Arm:
    """What one way to decode took.

    Attributes:
        name: ``"plain"``, ``"prefilled"``, ``"mapped"`` or ``"garbage"``.
        tokens: Tokens that came out.
        prepare: Seconds to get the draft model's cache.
        decode: Seconds to generate, reading the prompt's rest included.
        acceptance: See :func:`acceptance`; NaN without a draft model.
        parted_at: Index of the first token that differs from plain greedy, and
            the gap between the target's two best logits there in the plain run;
            ``None`` if all are equal.
    """

    name: str
    tokens: tuple[int, ...]
    prepare: float
    decode: float
    acceptance: float
    parted_at: tuple[int, float] | None = None

    @property
    def seconds(self) -> float:
        """Seconds from the target's cache to the last token."""
        return self.prepare + self.decode


@dataclass(frozen=True)
class Measurement:
    """Ways to go on from one target cache, greedily.

    Attributes:
        n_context: Tokens in the target's cache.
        n_prompt: Tokens after it.
        num_draft_tokens: Proposals per round.
        arms: By name; see :class:`Arm`.
    """

    n_context: int
    n_prompt: int
    num_draft_tokens: int
    arms: dict[str, Arm]

    @property
    def saved(self) -> float:
        """Seconds that mapping saves over letting the draft model read the context."""
        return self.arms["prefilled"].prepare - self.arms["mapped"].prepare


def measure(
    context: Sequence[int],
    prompt: Sequence[int],
    target: Module,
    draft: Module,
    mapper: Mapper,
    *,
    max_tokens: int = 128,
    num_draft_tokens: int = 3,
    native_end: int = 1,
) -> Measurement:
    """Compare plain greedy decoding with three draft caches: prefilled, mapped, garbage.

    Every arm starts from the target's own cache of ``context``, whose making is
    not counted. The garbage arm has the draft model read one token over and
    over: what is left of the acceptance there comes without the context.

    Args:
        context: Tokens that the target has in its cache.
        prompt: Tokens after them, at least one.
        target: The target.
        draft: The draft model.
        mapper: A mapper from the target to the draft model.
        max_tokens: Tokens to generate.
        num_draft_tokens: Proposals per round.
        native_end: See :func:`draft_cache`.

    Raises:
        UnsupportedModelError: See :func:`check_models`.
        PairMismatchError: If the mapper leads to another model.
    """
    check_models(target, draft)
    ids, rest = list(context), list(prompt)
    # Once before the clock starts: kernels are compiled, files get into memory.
    _decode_plain(rest, target, prefill(target, ids[:8]), 2)
    draft_cache(prefill(target, ids[:8]), mapper, draft)
    own = prefill(target, ids)
    start = time.perf_counter()
    plain, logprobs = _decode_plain(rest, target, own, max_tokens)
    arms = {"plain": Arm("plain", tuple(plain), 0.0, time.perf_counter() - start, float("nan"))}

    def prefilled(cache: list[Any]) -> list[Any]:
        return prefill(draft, ids)

    def mapped(cache: list[Any]) -> list[Any]:
        return draft_cache(cache, mapper, draft, tokens=ids, native_end=native_end)

    def garbage(cache: list[Any]) -> list[Any]:
        return prefill(draft, [ids[0]] * len(ids))

    for name, make in (("prefilled", prefilled), ("mapped", mapped), ("garbage", garbage)):
        cache = prefill(target, ids)
        start = time.perf_counter()
        joint = [*cache, *make(cache)]
        prepared = time.perf_counter()
        out = list(
            speculate(rest, target, draft, joint, max_tokens=max_tokens,
                      num_draft_tokens=num_draft_tokens)
        )  # fmt: skip
        done = time.perf_counter()
        tokens = tuple(token for token, _ in out)
        at = next((i for i, (a, b) in enumerate(zip(plain, tokens)) if a != b), None)
        arms[name] = Arm(
            name,
            tokens,
            prepared - start,
            done - prepared,
            acceptance([proposal for _, proposal in out], num_draft_tokens),
            None if at is None else (at, _lead(logprobs[at])),
        )
    return Measurement(len(ids), len(rest), num_draft_tokens, arms)


def _decode_plain(
    prompt: Sequence[int], target: Module, cache: list[Any], max_tokens: int
) -> tuple[list[int], list[mx.array]]:
    """Greedy tokens, and the log probabilities that each was chosen from."""
    steps = generate_step(mx.array(list(prompt)), target, max_tokens=max_tokens, prompt_cache=cache)
    tokens, logprobs = [], []
    for token, out in steps:
        tokens.append(int(token))
        logprobs.append(out)
    return tokens, logprobs


def _lead(logprobs: mx.array) -> float:
    """How far the best token is ahead of the second best."""
    two = np.array(mx.topk(logprobs.astype(mx.float32), 2))
    return float(two.max() - two.min())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default=str(bundled("models/large")))
    parser.add_argument("--draft", default=str(bundled("models/small")))
    parser.add_argument("--mapper", default=str(bundled("mapper")))
    parser.add_argument("--text", type=Path, help="a text file (default: held-out stories)")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--context", type=int, default=768, help="tokens in the target's cache")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--num-draft-tokens", type=int, default=3)
    parser.add_argument(
        "--native-end",
        type=int,
        default=1,
        help="last tokens that the draft model reads, the one after the context included",
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    target, draft = load_model(args.target), load_model(args.draft)
    mapper = Mapper.load(args.mapper)
    check_pair(mapper, source_model=target.identity(), target_model=draft.identity())
    for loaded in (target, draft):
        loaded.model.set_dtype(getattr(mx, args.dtype))
    texts = [args.text.read_text("utf-8")] if args.text else documents("heldout_stories")
    # The prompt proper: a few tokens after the context, read by both models.
    length = args.context + 8
    chosen = windows(texts, target.tokenizer, length, args.documents)
    if args.text:
        ids = list(target.tokenizer.encode(texts[0]))
        step = max(1, (len(ids) - length) // max(1, args.documents - 1))
        chosen = [ids[i * step : i * step + length] for i in range(args.documents)]
    results = [
        measure(
            ids[: args.context],
            ids[args.context :],
            target.model,
            draft.model,
            mapper,
            max_tokens=args.max_tokens,
            num_draft_tokens=args.num_draft_tokens,
            native_end=args.native_end,
        )
        for ids in chosen
    ]
    print(
        f"{target.name} with {draft.name}, {args.dtype}, {mx.default_device()}: {len(results)} "
        f"texts, {args.context} tokens of context, {args.max_tokens} new, "
        f"{args.num_draft_tokens} proposed per round, native end {args.native_end}"
    )
    print(
        f"{'draft cache':12s} {'prepare s':>10s} {'decode s':>9s} {'accepted':>9s}  equal to plain"
    )
    for name in results[0].arms:
        arms = [r.arms[name] for r in results]
        parted = [arm.parted_at for arm in arms if arm.parted_at is not None]
        print(
            f"{name:12s} {statistics.median(a.prepare for a in arms):10.3f} "
            f"{statistics.median(a.decode for a in arms):9.3f} "
            f"{statistics.fmean(a.acceptance for a in arms):9.3f}  "
            f"{len(arms) - len(parted)} of {len(arms)}"
            + "".join(f"  (parted at {at}, gap {gap:.1e})" for at, gap in parted)
        )
    saved = statistics.median(r.saved for r in results)
    print(f"Mapping saves {saved:.3f} s of reading by the draft model (median).")
    if args.json:
        args.json.write_text(json.dumps([asdict(r) for r in results], indent=1), "utf-8")


if __name__ == "__main__":
    main()
