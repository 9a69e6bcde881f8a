"""Advice on the embedded engine: refused requests, preemption, reads from DRAM. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.units import format_bytes
from penstock.watch.advice import MANY, Advice, Rule, Urgency, tokens_of_steps
from penstock.watch.samples import Samples

_COLD_SHARE = 0.5  # of the steps' time, spent on the link


def _refusals(seen: Samples) -> Iterator[Advice]:
    counts = seen.by("penstock_refused_requests_total", "reason")
    busy, long, large = (counts.get(reason, 0.0) for reason in ("busy", "too_long", "no_room"))
    every = max(1.0, seen.total("penstock_requests_total") + busy + long + large)
    if long:
        yield Advice(
            Urgency.ACT if long / every > MANY else Urgency.CONSIDER,
            "refusals",
            f"{long:,.0f} {_were(long)} refused as longer than the model's context, "
            f"{long / every:.0%} of all",
            "more memory does not help: send shorter prompts or lower max_tokens, or serve a model "
            "with a longer context",
            (("too_long", long),),
        )
    if large:
        yield Advice(
            Urgency.ACT if large / every > MANY else Urgency.CONSIDER,
            "refusals",
            f"{large:,.0f} {_were(large)} refused because the KV does not fit into GPU and DRAM "
            f"together, {large / every:.0%} of all",
            "raise --kv-offloading-size or --device-kv-gib, or let clients lower max_tokens",
            (("no_room", large),),
        )
    if busy / every > MANY:
        yield Advice(
            Urgency.ACT,
            "refusals",
            f"{busy:,.0f} {_were(busy)} refused because too many were waiting, {busy / every:.0%} "
            "of all",
            "add DRAM, so that more sessions can start; or raise --max-waiting, or add a server",
            (("busy", busy), ("ended", seen.total("penstock_requests_total"))),
        )


def _were(num: float) -> str:
    return "request was" if num == 1 else "requests were"


def _preemptions(seen: Samples) -> Iterator[Advice]:
    ended = seen.total("penstock_requests_total")
    preempted = seen.total("penstock_preemptions_total")
    if ended and preempted / ended > 0.1:
        again = seen.total("penstock_recomputed_tokens_total")
        yield Advice(
            Urgency.CONSIDER,
            "preemption",
            f"sequences were preempted {preempted:,.0f} times in {ended:,.0f} requests; "
            f"{again:,.0f} tokens were computed again",
            "lower --max-num-seqs, or give the GPU's pool more memory (--device-kv-gib)",
            (("preemptions", preempted), ("recomputed_tokens", again)),
        )


def _cold_reads(seen: Samples) -> Iterator[Advice]:
    tokens = tokens_of_steps(seen)
    num_bytes = seen.total("penstock_cold_bytes_read_total")
    steps_seconds = seen.total("penstock_step_seconds_sum")
    link_seconds = seen.total("penstock_cold_link_seconds_total")
    if not (tokens and num_bytes and steps_seconds):
        return
    share = link_seconds / steps_seconds
    finding = (
        f"each token reads {format_bytes(num_bytes / tokens)} of KV from DRAM, which takes "
        f"{share:.0%} of the steps' time"
    )
    numbers = (("cold_bytes_per_token", num_bytes / tokens), ("link_share", share))
    if share > _COLD_SHARE:
        change = (
            "more sessions run than fit into the GPU's memory: lower --max-num-seqs or "
            "--max-cold-gib-per-step, set --session-device-tokens, or use --no-cold-kv if latency "
            "matters"
        )
        yield Advice(Urgency.ACT, "cold reads", finding, change, numbers)
    else:
        yield Advice(Urgency.WELL, "cold reads", finding, "", numbers)


def _thrashing(seen: Samples) -> Iterator[Advice]:
    left = seen.total("penstock_migrated_blocks_total", direction="leave")
    returned = seen.total("penstock_migrated_blocks_total", direction="return")
    tokens = tokens_of_steps(seen)
    if tokens and min(left, returned) > tokens:
        yield Advice(
            Urgency.CONSIDER,
            "residency",
            f"{left:,.0f} blocks left the GPU and {returned:,.0f} came back for {tokens:,.0f} "
            "tokens: KV moves back and forth",
            "set the watermarks further apart, or limit sessions with --session-device-tokens",
            (("left_blocks", left), ("returned_blocks", returned)),
        )


RULES: tuple[Rule, ...] = (_refusals, _preemptions, _cold_reads, _thrashing)
