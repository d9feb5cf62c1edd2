"""``python -m kvgraft``: the same as ``kvgraft``."""

import sys

from kvgraft.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
