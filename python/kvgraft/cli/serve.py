"""``kvgraft serve``: mlx-lm's server, with caches mapped between models."""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["add_parser"]


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "serve",
        help="mlx_lm.server that maps caches when a conversation changes the model",
        usage="kvgraft serve --mapper PATH [--mapper PATH …] [options of mlx_lm.server]",
        description=(
            "Takes all options of mlx_lm.server (see mlx_lm.server --help). When a request names "
            "another model than the conversation had so far, its cache is mapped rather than "
            "read again, if one of the mappers leads there."
        ),
        # Otherwise --m would be a mapper here and a model there.
        allow_abbrev=False,
    )
    parser.add_argument(
        "--mapper",
        action="append",
        default=[],
        metavar="PATH",
        help="mapper artifact; it knows its two models. May be given several times",
    )
    parser.add_argument(
        "--min-gain",
        type=_tokens,
        metavar="TOKENS",
        help="map only if it saves reading at least this many tokens (default: 64)",
    )
    parser.add_argument(
        "--force", action="store_true", help="use mappers whose evaluation says 'do not ship'"
    )
    parser.set_defaults(command=run, takes_more=True)


def run(args: argparse.Namespace) -> int:
    """Start, serve until interrupted, stop."""
    from kvgraft.cli.interrupt import terminate_as_interrupt
    from kvgraft.errors import ServerError
    from kvgraft.models.loading import resolve_model
    from kvgraft.serve.routes import load_routes
    from kvgraft.serve.server import Server, make_provider
    from kvgraft.serve.store import MIN_GAIN

    if not args.mapper:
        raise ServerError("Give at least one --mapper; without any, mlx_lm.server does the same.")
    provider = make_provider(args.more)  # refuses wrong options; loads nothing
    for asked in (provider.cli_args.model, getattr(provider.cli_args, "draft_model", None)):
        if asked is not None:
            resolve_model(asked)  # mlx-lm would go on listening with no model behind it
    routes, left_out = load_routes(args.mapper, force=args.force)
    for route in routes:
        print(f"kvgraft: {route}", flush=True)
        if route.verdict != "ship":
            for reason in route.mapper.quality.reasons:
                print(f"kvgraft:   {reason}", flush=True)
    for message in left_out:
        print(f"kvgraft: {message}", flush=True)
    with terminate_as_interrupt():
        min_gain = MIN_GAIN if args.min_gain is None else args.min_gain
        Server(provider, routes, min_gain=min_gain).serve_forever()
    return 0


def _tokens(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens, 0 or more")
    return int(text)
