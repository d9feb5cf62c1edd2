"""``kvgraft transfer``: map a prompt-cache file from one model to another."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from kvgraft.cli.options import FORCE, NATIVE, add_fields, describe

__all__ = ["add_options", "run"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvgraft transfer``."""
    from kvgraft.handoff import SwitchOptions

    describe(
        parser,
        "Map a prompt cache of mlx_lm.cache_prompt into one that mlx_lm.generate "
        "--prompt-cache-file continues from with the target model. The source model is not "
        "needed.",
        "  kvgraft transfer large.safetensors small.safetensors --mapper my-mapper \\",
        "    --target Qwen/Qwen2.5-0.5B-Instruct",
    )
    parser.add_argument("source", metavar="IN", help="prompt-cache file of the source model")
    parser.add_argument("out", metavar="OUT", help="prompt-cache file to write")
    parser.add_argument("--mapper", required=True, metavar="PATH", help="mapper for the pair")
    parser.add_argument(
        "--target",
        required=True,
        metavar="MODEL",
        help="target model (folder or repository), as the file should name it",
    )
    add_fields(parser, SwitchOptions(), {**NATIVE, "force": FORCE})
    parser.add_argument(
        "--prompt-file",
        dest="prompt",
        metavar="FILE",
        help="the text that was cached ('-' reads stdin), if native tokens need it",
    )
    parser.add_argument("--kv-bits", type=int, metavar="N", help="quantise the result to N bits")
    parser.add_argument(
        "--kv-group-size",
        type=int,
        default=64,
        metavar="N",
        help="group size of a quantised result (default: %(default)s)",
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="allow code of the target's repository for its tokenizer",
    )


def run(args: argparse.Namespace) -> int:
    """Map the file, and print the command that continues from it."""
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
        native_start=args.native_start,
        native_end=args.native_end,
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
    print(f"Wrote {done.path} ({done.path.stat().st_size / 1e6:.1f} MB). Continue with:")
    more = f"--prompt-cache-file {shlex.quote(str(done.path))}"
    if args.kv_bits is not None:  # mlx-lm refuses another packing than the file's
        more += f" --kv-bits {args.kv_bits} --kv-group-size {args.kv_group_size}"
    print(f"  mlx_lm.generate {more} --prompt '…'")
    return 0
