"""Entry of `python -m patrickstar`: the command `patrickstar`."""

from __future__ import annotations

import sys

from patrickstar.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
