"""The audit in vLLM: which requests are audited, and which of their blocks are compared.

vLLM computes an audited request as if nothing had been found. Its blocks are copied by the step
that completes them, like all saves, and no step can overwrite them before that.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from penstock.audits.auditor import AuditBlock, AuditLimits, Auditor, advice
from penstock.audits.findings import AuditSubject
from penstock.audits.layout import BlockLayout
from penstock.audits.quarantine import Quarantine
from penstock.audits.sample import AuditSample
from penstock.audits.tolerance import Tolerance
from penstock.codecs.names import loss_of
from penstock.config import Config
from penstock.connectors.vllm.tracked import Loading, Offer, Tracked, TrackedRequests
from penstock.events import Observer, Quarantined, tell
from penstock.keys import Namespace
from penstock.tiers import Tiers
from penstock.types import BlockKey, Done, Slot

log = logging.getLogger(__name__)


def open_auditor(
    offloader: Tiers,
    config: Config,
    namespace: Namespace,
    layouts: Sequence[BlockLayout],
    *,
    share: float,
    block_bytes: int,
    observers: Sequence[Observer] = (),
) -> Auditor | None:
    """The auditor, or None if nothing is audited. Imposes a quarantine that still stands."""
    digest = namespace.physical().digest()
    disk = None if config.disk.path is None else Path(config.disk.path)
    has_lower = disk is not None or config.remote.url is not None or config.node.url is not None
    quarantine = Quarantine(digest, disk, persists=has_lower)
    if (path := quarantine.find()) is not None:
        log.error("Stored KV is in quarantine: an audit has failed. %s", advice(path))
        offloader.quarantine()
        tell(observers, [Quarantined(str(path))])
        return None
    if share <= 0 or offloader.host is None:
        return None
    if loss := loss_of(offloader.codecs.values()):
        # What is computed differs from what is stored, and nobody knows by how much it may.
        log.warning('Nothing is audited: the codec "%s" does not keep KV bit for bit.', loss)
        return None
    if not all(layout.stretches for layout in layouts):
        # An audit that compares nothing would say that all is well.
        log.warning("Nothing is audited: the layout of this model's KV is unknown.")
        return None
    return Auditor(
        offloader,
        offloader.read_host,
        layouts,
        [Tolerance(layout) for layout in layouts],
        sample=AuditSample(share, os.urandom(16)),
        limits=AuditLimits.within(offloader.num_host_blocks, block_bytes),
        subject=AuditSubject(namespace.model, digest.hex(), namespace.block_tokens),
        quarantine=quarantine,
        observers=observers,
        on_failure=_warn_of_own_cache,
    )


def _warn_of_own_cache() -> None:
    log.error(
        "vLLM's own prefix cache may still hold KV that was loaded before the audit failed. Empty "
        "it (POST /reset_prefix_cache), or restart vLLM."
    )


class RequestAudits:
    """What the scheduler's side asks and tells. Without an auditor, nothing is audited."""

    def __init__(
        self,
        auditor: Auditor | None,
        requests: TrackedRequests,
        *,
        may_save: bool = True,
        reads_back: bool = True,
    ) -> None:
        """`reads_back`: whether blocks stay as they were loaded until the next step begins.

        Without `may_save` no request is computed for an audit: its blocks would not be collected.
        """
        self._auditor = auditor
        self._requests = requests
        self._may_save = may_save
        self._reads_back = reads_back

    @property
    def is_busy(self) -> bool:
        return self._auditor is not None and self._auditor.is_busy

    def draws(self, tracked: Tracked, offer: Offer) -> bool:
        """Whether vLLM is to compute what it is offered. Decided once for each request."""
        if self._auditor is None or not self._may_save:
            return False
        if not offer.num_tokens or tracked.keys is None:
            return False
        if tracked.is_audited is None:
            _, group, blocks = self._requests.pieces(offer.end, offer.start)[0]
            first = tracked.keys_of(group, blocks)[0]
            # A preempted request resumes: computing it again would be a long wait.
            is_new = not getattr(tracked.request, "num_preemptions", 0)
            tracked.is_audited = is_new and self._auditor.draws(first)
        return tracked.is_audited

    def start(self, tracked: Tracked, offer: Offer) -> None:
        """vLLM begins to compute a request that is audited."""
        if self._auditor is None or not tracked.is_audited or not offer.num_tokens:
            return
        request_id = tracked.request.request_id
        tracked.audited_tokens = offer.end
        blocks = self._blocks(tracked, offer.end, offer.start)
        self._auditor.begin(request_id, blocks, tenant=tracked.tenant)

    def computed(self, tracked: Tracked, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> None:
        """The step being ordered completes these blocks."""
        if self._auditor is not None and self._auditor.awaits(tracked.request.request_id):
            self._auditor.save(tracked.request.request_id, keys, slots)

    def keeps_from_tiers(self, key: BlockKey) -> bool:
        """Whether a computed block must not take the place of the stored one yet."""
        return self.is_busy and self._auditor is not None and self._auditor.is_under_audit(key)

    def loaded(self, tracked: Tracked, loading: Loading, done: Done) -> None:
        """A load has ended, and all of its blocks arrived: read some of them back."""
        if self._auditor is None or not self._reads_back or tracked.keys is None:
            return
        blocks = self._blocks(tracked, loading.end, loading.start)
        if [block.key for block in blocks] == list(done.keys):
            self._auditor.read_back(blocks, loading.slots, done.sources, tenant=tracked.tenant)

    def left(self, tracked: Tracked) -> None:
        """A request has ended, or vLLM has taken its blocks back."""
        if self._auditor is not None and tracked.is_audited:
            tracked.is_audited = False  # if it resumes, it is loaded
            self._auditor.left(tracked.request.request_id)

    def settle(self, done: Done) -> bool:
        """Finish an audit's load or save. False if it was neither."""
        return self._auditor is not None and self._auditor.settle(done)

    def void(self) -> None:
        """End all audits without a result: the model's weights may have been replaced."""
        if self._auditor is not None:
            self._auditor.void()

    def poll(self) -> None:
        """Act on what was compared."""
        if self._auditor is not None:
            self._auditor.poll()

    def reset(self) -> None:
        """Forget all audits. Afterwards no thread reads DRAM."""
        if self._auditor is not None:
            self._auditor.reset()

    def _blocks(self, tracked: Tracked, end: int, start: int) -> list[AuditBlock]:
        """What a hit of `end` tokens loads, in the order in which it is loaded."""
        found: list[AuditBlock] = []
        for place, group, indices in self._requests.pieces(end, start):
            keys = tracked.keys_of(group, indices)
            before: list[BlockKey | None] = [tracked.parent_key(group, indices.start), *keys[:-1]]
            if not group.is_full:
                before = [None] * len(keys)
            found += map(AuditBlock, keys, indices, before, [place] * len(keys))
        return found
