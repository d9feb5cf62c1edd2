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
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx

from kvgraft.demo.data import bundled, documents, windows
from kvgraft.handoff.speculative import measure
from kvgraft.mapper.mapper import Mapper
from kvgraft.mapper.pair import check_pair
from kvgraft.models.loading import load_model


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
    parser.add_argument("--tail", type=int, default=0, help="tokens that the draft model reads")
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
            tail=args.tail,
        )
        for ids in chosen
    ]
    print(
        f"{target.name} with {draft.name}, {args.dtype}, {mx.default_device()}: {len(results)} "
        f"texts, {args.context} tokens of context, {args.max_tokens} new, "
        f"{args.num_draft_tokens} proposed per round, draft tail {args.tail}"
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
