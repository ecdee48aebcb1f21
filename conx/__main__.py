"""`python -m conx`."""

import sys

from conx.cli import main

if __name__ == "__main__":
    sys.exit(main())
