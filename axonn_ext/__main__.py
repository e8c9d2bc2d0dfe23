"""`python -m axonn_ext` is `axonn-ext`; what torchrun starts."""

from __future__ import annotations

from axonn_ext.cli.main import end_process, main

if __name__ == "__main__":
    end_process(main())
