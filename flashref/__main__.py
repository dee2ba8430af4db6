"""`python -m flashref`."""

import sys

from flashref.cli import main

if __name__ == "__main__":
    sys.exit(main())
