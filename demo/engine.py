"""Show what offloading gains on this machine, with a real model: make demo.

    python demo/engine.py [--out DIR] [--quick] [--json]

(a) time to first token: recomputed, loaded from DRAM, loaded from disk
(b) twenty sessions in a device pool that holds three, with offloading off and on
(c) a server killed with kill -9, and the conversation resumed from its disk
(d) documents in another order, with their KV reused anywhere: sooner, but lossy

Writes DIR/report.html with charts, and DIR/results.json. Takes less than five minutes on two cores.
Exits with 1 if a single token of (a) to (c) differs from the run without loads.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

from rich.console import Console


def main() -> int:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo/out"), metavar="DIR")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to check that it works")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    options = parser.parse_args()
    console = Console(stderr=options.json)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that child processes are stopped
    # Waiting threads give up their core, so that on a busy machine the others finish sooner.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with console.status("importing torch and transformers"):
        from story import FULL, QUICK, tell  # takes seconds, so the status is shown first
    options.out.mkdir(parents=True, exist_ok=True)
    results = tell(QUICK if options.quick else FULL, options.out, console, started)
    text = json.dumps(results, indent=2, allow_nan=False) + "\n"
    (options.out / "results.json").write_text(text)
    if options.json:
        sys.stdout.write(text)
    return 0 if results["identical"] else 1


if __name__ == "__main__":
    sys.exit(main())
