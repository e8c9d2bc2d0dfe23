"""`python -m axonn_ext` is `axonn-ext`; what torchrun starts."""

from __future__ import annotations

import sys

from axonn_ext.cli import main

if __name__ == "__main__":
    sys.exit(main())
