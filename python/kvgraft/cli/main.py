"""The ``kvgraft`` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from kvgraft.errors import KvgraftError
from kvgraft.option_names import command_line

__all__ = ["main"]

Command = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    0: done. 1: refused or failed, with the reason on stderr. 2: bad usage.
    130: interrupted.
    """
    # Its warnings about text longer than a context window do not apply: text is
    # tokenised as a whole and then cut.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from kvgraft.cli.parser import build_parser
    from kvgraft.cli.renamed import current_names

    given = current_names(sys.argv[1:] if argv is None else argv)
    parser = build_parser(given[0] if given else None)
    args, more = parser.parse_known_args(given)
    if getattr(args, "takes_more", False):
        args.more = more  # options of the program that the command extends
    elif more:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    command: Command = args.command
    try:
        with command_line():
            return command(args)
    except KvgraftError as error:
        print(f"kvgraft: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nkvgraft: interrupted; nothing was half-written.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output went away (``kvgraft inspect … | head``).
        sys.stderr.close()
        return 1


if __name__ == "__main__":
    sys.exit(main())
