"""Metrics of where running sequences' KV is, and what reading it from DRAM costs."""

from __future__ import annotations

from penstock.events import Event, Migrated, ResidentShare, Stepped
from penstock.metrics.families import Families

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class ResidencyMetrics:
    def __init__(self, make: Families) -> None:
        self._steps = make.histogram(
            "penstock_step_seconds", "One step of the engine.", buckets=_SECONDS
        )
        self._tokens = make.counter(
            "penstock_step_tokens", "Tokens computed, in prompts and answers."
        )
        self._sequences = make.counter(
            "penstock_step_sequences",
            "Sequences in all steps: each computes one token, or a piece of a prompt.",
        )
        self._cold_blocks = make.counter(
            "penstock_cold_blocks_read", "Blocks that steps read from DRAM, counted at every step."
        )
        self._cold_bytes = make.counter(
            "penstock_cold_bytes_read", "Bytes that steps read from DRAM."
        )
        self._link = make.counter(
            "penstock_cold_link_seconds", "Estimated link time of reading cold blocks."
        )
        self._migrated = make.counter(
            "penstock_migrated_blocks",
            "Blocks of running sequences that left the device or returned to it.",
            ("direction",),
        )
        self._resident = make.gauge(
            "penstock_resident_share",
            "Share of running sequences' KV on the device: the lowest sequence, and all.",
            ("of",),
        )

    def __call__(self, event: Event) -> None:
        match event:
            case Stepped(num_sequences, num_tokens, seconds, num_blocks, num_bytes, link_seconds):
                self._sequences.inc(num_sequences)
                self._steps.observe(seconds)
                self._tokens.inc(num_tokens)
                self._cold_blocks.inc(num_blocks)
                self._cold_bytes.inc(num_bytes)
                self._link.inc(link_seconds or 0.0)
            case Migrated(num_left, num_returned):
                self._migrated.labels("leave").inc(num_left)
                self._migrated.labels("return").inc(num_returned)
            case ResidentShare(lowest, of_all):
                self._resident.labels("lowest").set(lowest)
                self._resident.labels("all").set(of_all)
