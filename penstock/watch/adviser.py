"""What to change on a running server, from its own counters. Pure: metrics in, advice out."""

from __future__ import annotations

from penstock.watch import engine_rules, fault_rules, tier_rules
from penstock.watch.advice import Advice, Urgency
from penstock.watch.samples import Samples


def advise(seen: Samples) -> list[Advice]:
    """The most urgent first, and of these what is broken before what is too small.

    `seen` counts since the server's start, or since an earlier look.
    """
    rules = (*fault_rules.RULES, *engine_rules.RULES, *tier_rules.RULES)
    found = [advice for rule in rules for advice in rule(seen)]
    order = list(Urgency)
    return sorted(found, key=lambda advice: order.index(advice.urgency))
