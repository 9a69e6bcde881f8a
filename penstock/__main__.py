"""`python -m penstock` is the command line."""

from __future__ import annotations

import sys

from penstock.cli import main

sys.exit(main())
