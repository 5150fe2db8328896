"""`python -m tfckpt`: the same as the `tfckpt` command."""

import sys

from tfckpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
