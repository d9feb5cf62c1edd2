"""``kvgraft transfer``: map a prompt-cache file from one model to another."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

__all__ = ["add_parser"]


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "transfer",
        help="map a prompt-cache file of mlx-lm from one model to another",
        description="Map a prompt cache of mlx_lm.cache_prompt into one that mlx_lm.generate "
        "--prompt-cache-file goes on from with the target model. The source model is not needed.",
    )
    parser.add_argument("source", metavar="IN", help="prompt-cache file of the source model")
    parser.add_argument("out", metavar="OUT", help="prompt-cache file to write")
    parser.add_argument("--mapper", required=True, help="mapper for the two models")
    parser.add_argument(
        "--target",
        required=True,
        help="target model, as it is to stand in the file: a folder or a repository",
    )
    parser.add_argument(
        "--native-start",
        type=int,
        help="first tokens that the target reads itself (default: what the "
        "mapper's evaluation recommends)",
    )
    parser.add_argument(
        "--native-end",
        type=int,
        help="last tokens that the target reads itself, with the one to continue from (default: "
        "what the mapper's evaluation recommends)",
    )
    parser.add_argument(
        "--prompt-file",
        dest="prompt",
        help="the text that was cached ('-' reads stdin), if --native-start or --native-end needs "
        "it",
    )
    parser.add_argument(
        "--force", action="store_true", help='map even if the mapper\'s verdict is "do not ship"'
    )
    parser.add_argument("--kv-bits", type=int, help="quantise the result to so many bits")
    parser.add_argument(
        "--kv-group-size",
        type=int,
        default=64,
        help="numbers that share a scale when quantised (default: 64)",
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="let the target's tokenizer run code of its own",
    )
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Map the file and say what to do with it."""
    from kvgraft.errors import CacheFileNotFoundError
    from kvgraft.handoff.transfer_file import transfer_file
    from kvgraft.mapper.mapper import open_mapper

    prompt = None
    if args.prompt == "-":
        prompt = sys.stdin.read()
    elif args.prompt is not None:
        try:
            prompt = Path(args.prompt).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CacheFileNotFoundError(f"Cannot read {args.prompt}: {error}") from error
    done = transfer_file(
        args.source,
        args.out,
        open_mapper(args.mapper),
        args.target,
        prompt=prompt,
        head=args.native_start,
        tail=None if args.native_end is None else args.native_end - 1,
        force=args.force,
        kv_bits=args.kv_bits,
        kv_group_size=args.kv_group_size,
        trust_remote_code=args.trust_remote_code,
    )
    for note in done.notes:
        print(f"kvgraft: note: {note}", file=sys.stderr)
    native = done.n_tokens - done.n_mapped
    read = f", {native} read by the target" if native else ""
    print(f"Mapped {done.n_mapped} of {done.n_tokens} tokens{read} in {done.seconds:.2f} s.")
    print(f"Wrote {done.path} ({done.path.stat().st_size / 1e6:.1f} MB). Go on with:")
    more = f"--prompt-cache-file {shlex.quote(str(done.path))}"
    if args.kv_bits is not None:  # mlx-lm refuses another packing than the file's
        more += f" --kv-bits {args.kv_bits} --kv-group-size {args.kv_group_size}"
    print(f"  mlx_lm.generate {more} --prompt '…'")
    return 0
