"""Another process at a shared arena. Run by tests/stores/test_host.py, which speaks to it by lines.

    python shared_child.py

Reads a handle, then commands, each a line of JSON; answers each with a line.
"""

from __future__ import annotations

import hashlib
import json
import sys

from penstock.stores.host import ArenaHandle, HostArena
from penstock.transfer.seals import Seals
from penstock.types import BlockKey, Slot


def main() -> None:
    arena = HostArena.open(ArenaHandle(**json.loads(sys.stdin.readline())))
    seals = Seals(arena, memory=arena.seals)
    for line in sys.stdin:
        match json.loads(line):
            case ["fill", slot, byte]:
                arena.view(slot)[:] = bytes([byte]) * arena.stride_bytes
                answer: object = None
            case ["digest", slot]:
                answer = hashlib.sha256(arena.view(slot)).hexdigest()
            case ["open", slot]:
                seals.open([Slot(slot)])
                answer = None
            case ["seal", key, slot]:
                seals.seal([BlockKey(bytes.fromhex(key))], [Slot(slot)])
                answer = None
            case ["verdict", key, slot]:
                answer = seals.verdicts([BlockKey(bytes.fromhex(key))], [Slot(slot)])[0]
            case command:
                raise ValueError(command)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
