"""Lists, samples and verifies the values in a remote store."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.errors import Corrupt, Missing
from penstock.stores.envelope import HEAD_BYTES, Envelope, HeadFacts, read_head
from penstock.stores.remote import Client, Item
from penstock.types import BlockKey, BlockSpec

PREFIX = "penstock/1/"
NAMES_AT_ONCE = 1000
_VALUES_AT_ONCE = 16
_BATCH_BYTES = 32 << 20
_MAX_SAMPLES = 3
_SETTLE_SECONDS = 0.05
_NAME = re.compile(re.escape(PREFIX) + "([0-9a-f]{32})/([0-9a-f]{64})")

Values = dict[str, int]
"""Value names and their sizes in bytes."""


class RemoteDamage(NamedTuple):
    name: str
    problem: str


@dataclass(slots=True)
class RemoteAudit:
    """How many values there are of each kind. Each value is counted once."""

    num_ok: int = 0
    num_encrypted: int = 0  # sound header; the data needs the tenant's name to be verified
    num_expired: int = 0  # sound, but past their time; not every store removes those
    num_foreign: int = 0  # of another secret or another program: cannot be verified
    num_changed: int = 0  # removed or replaced during the check; not damage
    damages: list[RemoteDamage] = field(default_factory=list)


def list_values(client: Client, prefix: str, tick: Callable[[int], None]) -> Values:
    """All values with this prefix, each once: Redis may list a name twice while it resizes."""
    found: Values = {}
    for page in client.find(prefix):
        found.update(page)
        tick(len(found))
    return found


def namespace_prefix(name: str) -> str | None:
    """The digits derived from namespace and secret; None if it is not the name of a block."""
    parts = _NAME.fullmatch(name)
    return parts[1] if parts else None


def sample(client: Client, values: Mapping[str, int]) -> HeadFacts | None:
    """The header of one value; None if none of the first few values has a readable one."""
    for name, num_bytes in list(values.items())[:_MAX_SAMPLES]:
        if num_bytes >= HEAD_BYTES:
            (item,) = items = _new_items([(name, num_bytes)])
            _get(client, items)
            if (facts := read_head(bytes(item.head))) is not None:
                return facts
    return None


def remove_values(client: Client, names: Sequence[str], tick: Callable[[float], None]) -> None:
    for start in range(0, len(names), NAMES_AT_ONCE):
        tick(start / len(names))
        client.remove(names[start : start + NAMES_AT_ONCE])


def audit(
    client: Client, values: Values, secret: bytes, tick: Callable[[float], None]
) -> RemoteAudit:
    """Read every value and verify its checksums. Changes nothing. Raises StoreError."""
    auditor = _Auditor(client, secret)
    num_bytes, num_done = max(1, sum(values.values())), 0
    for batch in _batches(values):
        auditor.check(batch)
        num_done += sum(size for _, size in batch)
        tick(num_done / num_bytes)
    return auditor.finish(values)


class _Auditor:
    def __init__(self, client: Client, secret: bytes) -> None:
        self._client = client
        self._secret = secret
        self._now = time.time()
        self._found = RemoteAudit()
        self._ours: set[str] = set()  # prefixes proven by a header to belong to this secret
        self._suspects: dict[str, str] = {}  # name to problem

    def check(self, batch: Sequence[tuple[str, int]]) -> None:
        whole = [(name, size) for name, size in batch if size >= HEAD_BYTES]
        for name in self._still_there([name for name, size in batch if size < HEAD_BYTES]):
            self._suspects[name] = "shorter than a header"
        items = _new_items(whole)
        for item, is_read in zip(items, _get(self._client, items), strict=True):
            if not is_read:
                self._found.num_changed += 1
            elif problem := self._judge(item):
                self._suspects[item.name] = problem

    def finish(self, values: Values) -> RemoteAudit:
        """A value is damaged if it fails twice and its prefix belongs to this secret."""
        suspects, self._suspects = self._suspects, {}
        ours = {name: values[name] for name in suspects if namespace_prefix(name) in self._ours}
        self._found.num_foreign += len(suspects) - len(ours)
        if ours:
            time.sleep(_SETTLE_SECONDS)
        for batch in _batches(ours):
            self.check(batch)
        self._found.damages = [RemoteDamage(*suspect) for suspect in sorted(self._suspects.items())]
        return self._found

    def _judge(self, item: Item) -> str:
        """Count a sound value and return ""; otherwise return what is wrong with it."""
        head = bytes(item.head)
        facts, parts = read_head(head), _NAME.fullmatch(item.name)
        if facts is None or parts is None:
            return "the header cannot be read"
        if facts.encrypted and not self._secret:
            return "encrypted, but no secret is set"
        num_bytes = len(item.body)
        # One value may hold several blocks (see `stores.packs`), each after its own header.
        is_whole = (HEAD_BYTES + num_bytes) % (HEAD_BYTES + facts.block_bytes) == 0
        size = facts.block_bytes if is_whole else num_bytes
        spec = BlockSpec(facts.namespace, size, 1)
        envelope = Envelope(spec, secret=self._secret, encrypt=facts.encrypted)
        if envelope.prefix != parts[1]:
            return "the header is damaged, or of another namespace"
        self._ours.add(parts[1])  # only this secret gives this namespace this prefix
        if not is_whole:
            return f"{num_bytes:,} bytes of data, but the header says {facts.block_bytes:,}"
        values = [item, *_more_values(item, size)]
        for number, value in enumerate(values, 1):
            mine = bytes(value.head)
            key = facts.key if (found := read_head(mine)) is None else found.key
            if number == len(values):
                key = BlockKey(bytes.fromhex(parts[2]))  # a value is named after its last block
            if facts.encrypted:
                error = envelope.judge_head(key, mine, now=0.0)
            else:
                error = envelope.open(key, "", mine, value.body[:size], now=0.0)
            if error is not None:
                return str(error)
        if facts.expires is not None and facts.expires <= self._now:
            self._found.num_expired += 1
        elif facts.encrypted:
            self._found.num_encrypted += 1
        else:
            self._found.num_ok += 1
        return ""

    def _still_there(self, names: Sequence[str]) -> list[str]:
        # Redis reports 0 bytes for a value that was removed after it was listed.
        held = self._client.exists(names)
        self._found.num_changed += held.count(False)
        return [name for name, is_held in zip(names, held, strict=True) if is_held]


def _new_items(batch: Sequence[tuple[str, int]]) -> list[Item]:
    whole = [(name, memoryview(bytearray(num_bytes))) for name, num_bytes in batch]
    return [Item(name, value[:HEAD_BYTES], value[HEAD_BYTES:]) for name, value in whole]


def _more_values(pack: Item, block_bytes: int) -> Iterator[Item]:
    """The blocks after the first."""
    rest = pack.body[block_bytes:]
    while rest:
        yield Item(pack.name, rest[:HEAD_BYTES], rest[HEAD_BYTES : HEAD_BYTES + block_bytes])
        rest = rest[HEAD_BYTES + block_bytes :]


def _get(client: Client, items: Sequence[Item]) -> list[bool]:
    """Which could be read; the rest were removed or changed since. Raises StoreError."""
    answers = client.get(items)
    for answer in answers:
        # Corrupt: its size has changed since it was listed.
        if answer is not None and not isinstance(answer, Missing | Corrupt):
            raise answer
    return [answer is None for answer in answers]


def _batches(values: Values) -> Iterator[list[tuple[str, int]]]:
    batch: list[tuple[str, int]] = []
    num_bytes = 0
    for name, size in values.items():
        if batch and (len(batch) == _VALUES_AT_ONCE or num_bytes + size > _BATCH_BYTES):
            yield batch
            batch, num_bytes = [], 0
        batch.append((name, size))
        num_bytes += size
    if batch:
        yield batch
