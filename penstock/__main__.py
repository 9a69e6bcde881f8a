"""Run the command line with `python -m penstock`."""

from __future__ import annotations

import sys

from penstock.cli import main

sys.exit(main())
