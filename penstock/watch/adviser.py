"""What to change on a running server, from its metrics. Pure: metrics in, advice out."""

from __future__ import annotations

from penstock.watch import engine_rules, fault_rules, tier_rules
from penstock.watch.advice import Advice, Urgency
from penstock.watch.samples import Samples


def advise(seen: Samples) -> list[Advice]:
    """The most urgent advice first; among equals, faults before sizes.

    `seen` counts since the server's start, or since an earlier reading.
    """
    rules = (*fault_rules.RULES, *engine_rules.RULES, *tier_rules.RULES)
    found = [advice for rule in rules for advice in rule(seen)]
    order = list(Urgency)
    return sorted(found, key=lambda advice: order.index(advice.urgency))
