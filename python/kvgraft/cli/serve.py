"""``kvgraft serve``: mlx-lm's server, with caches mapped between models."""

from __future__ import annotations

import argparse

from kvgraft.cli.options import describe

__all__ = ["add_options", "run"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvgraft serve``."""
    from kvgraft.serve.store import MIN_GAIN

    describe(
        parser,
        "mlx_lm.server, with all of its options (see mlx_lm.server --help). When a conversation "
        "changes the model, its cache is mapped instead of re-prefilled, if there is a mapper "
        "for the pair.",
        "  kvgraft serve --mapper my-mapper --port 8080",
    )
    parser.usage = "kvgraft serve --mapper PATH [--mapper PATH …] [options of mlx_lm.server]"
    parser.allow_abbrev = False  # --m would be a mapper here and a model there
    parser.add_argument(
        "--mapper",
        action="append",
        default=[],
        metavar="PATH",
        help="mapper artifact, which names its two models; may be repeated",
    )
    parser.add_argument(
        "--min-gain",
        type=_tokens,
        default=MIN_GAIN,
        metavar="TOKENS",
        help="map only if it saves at least this many tokens of prefill (default: %(default)s)",
    )
    parser.add_argument(
        "--force", action="store_true", help='use mappers whose verdict is "do not ship"'
    )
    parser.set_defaults(takes_more=True)


def run(args: argparse.Namespace) -> int:
    """Start, serve until interrupted, stop."""
    from kvgraft.cli.interrupt import terminate_as_interrupt
    from kvgraft.errors import ServerError
    from kvgraft.models.loading import resolve_model
    from kvgraft.serve.routes import load_routes
    from kvgraft.serve.server import Server, make_provider

    if not args.mapper:
        raise ServerError("Give at least one --mapper; without any, mlx_lm.server does the same.")
    provider = make_provider(args.more)  # refuses wrong options; loads nothing
    for asked in (provider.cli_args.model, getattr(provider.cli_args, "draft_model", None)):
        if asked is not None:
            resolve_model(asked)  # mlx-lm would keep listening without a model
    routes, left_out = load_routes(args.mapper, force=args.force)
    for route in routes:
        print(f"kvgraft: {route}", flush=True)
        if route.verdict != "ship":
            for reason in route.mapper.quality.reasons:
                print(f"kvgraft:   {reason}", flush=True)
    for message in left_out:
        print(f"kvgraft: {message}", flush=True)
    with terminate_as_interrupt():
        Server(provider, routes, min_gain=args.min_gain).serve_forever()
    return 0


def _tokens(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens, 0 or more")
    return int(text)
