"""What Penstock will keep of a model in vLLM, from its config.json alone. vLLM is not needed."""

from __future__ import annotations

from typing import Any, NamedTuple

from penstock.codecs.names import RAW
from penstock.commands.group_rows import describe_group, group_rows
from penstock.commands.vllm_checks import Check, Status, installed_vllm
from penstock.config import Config
from penstock.errors import ConfigError
from penstock.groups.kinds import Kind
from penstock.shapes.catalog import find_model
from penstock.shapes.packing import Packing, pack_tiers
from penstock.shapes.shape import ModelShape
from penstock.shapes.sizing import find_shape
from penstock.types import Tier
from penstock.units import counted, format_bytes

# Before it, vLLM cannot report a failed load of a model with several groups.
_SEVERAL_GROUPS_SINCE = (0, 30)
_TOKENS = 1000
_CHECKPOINTS = ("the end of the prompt", "the end of the answer")


class ExaminedModel(NamedTuple):
    checks: list[Check]
    facts: dict[str, Any]  # for JSON


def examine_model(model: str, tiers: Config | None = None) -> ExaminedModel:
    """Check whether a model's layers can be restored, and say what will be kept of them.

    `tiers` are the settings in force, for the codecs.
    """
    try:
        known = find_model(model)
        shape = find_shape(model) if known is None else known.shape
    except ConfigError as error:
        facts = {"name": model, "is_supported": False, "refusal": str(error), "groups": []}
        return ExaminedModel([Check("model", Status.FAILED, str(error))], facts)
    refusal = _refusal(shape)
    groups = "; ".join(describe_group(shape, group) for group in shape.groups)
    found = f"{counted(len(shape.groups), 'group')} of layers. {groups}"
    checks = [Check("model", Status.OK, found)]
    if refusal is not None:
        checks = [Check("model", Status.FAILED, f"{found}. {refusal}")]
    checks.append(Check("kept", Status.OK, _kept(shape)))
    codec, packing = _check_codec(shape, tiers)
    checks.append(codec)
    facts = {
        "name": model,
        "is_supported": refusal is None,
        "refusal": refusal,
        "groups": group_rows(shape, _TOKENS),
        "bytes_per_1000_tokens": shape.full_bytes_per_token * _TOKENS,
        "checkpoint_bytes": shape.checkpoint_bytes(),
        "checkpoints_at": list(_CHECKPOINTS) if shape.partial_groups else [],
        "codecs": {
            tier.label: {"codec": each.codec, "ratio": each.ratio, "why": each.why}
            for tier, each in packing.items()
        },
    }
    return ExaminedModel(checks, facts)


def _check_codec(shape: ModelShape, tiers: Config | None) -> tuple[Check, dict[Tier, Packing]]:
    """How the tiers will pack this model's KV, or why not."""
    name, tiers = "codec", tiers or Config()
    settings = {
        Tier.HOST: tiers.host.codec,
        Tier.DISK: tiers.disk.codec,
        Tier.REMOTE: tiers.remote.codec,
    }
    try:
        found = pack_tiers(shape, settings)
    except ConfigError as error:
        return Check(name, Status.FAILED, str(error)), {}
    by_packing: dict[Packing, list[Tier]] = {}
    for tier, packing in found.items():
        by_packing.setdefault(packing, []).append(tier)
    sentences = [_describe(packing, same, shape) for packing, same in by_packing.items()]
    status = Status.OK
    if any(packing.is_lossy for packing in found.values()):
        status = Status.WARNING
    return Check(name, status, " ".join(sentences)), found


def _describe(packing: Packing, tiers: list[Tier], shape: ModelShape) -> str:
    names = ["DRAM" if tier is Tier.HOST else tier.label for tier in tiers]
    where = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    hold = "hold" if len(names) > 1 else "holds"
    if packing.codec == RAW:
        return f"{where} {hold} KV as it is. {packing.why}"
    size = f"{where} {hold} it packed to {packing.ratio:.2f} of its size"
    if packing.is_lossy:
        return (
            f"KV is {shape.kv_dtype}: {size} by {packing.codec}, which is lossy: answers differ "
            "from those with raw KV."
        )
    return f"KV is {shape.kv_dtype}: on a GPU, {size} ({packing.codec}, bit for bit)."


def _refusal(shape: ModelShape) -> str | None:
    """Why the installed vLLM cannot restore it. None if it can, or if no vLLM is installed."""
    found = installed_vllm()
    if len(shape.groups) == 1 or found is None:
        return None
    _, version = found
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
    except ValueError:
        return None
    if (major, minor) >= _SEVERAL_GROUPS_SINCE:
        return None
    return (
        f"vLLM {version} cannot report a failed load of a model with several groups: expected "
        f"{'.'.join(map(str, _SEVERAL_GROUPS_SINCE))} or later; install a newer vLLM."
    )


def _kept(shape: ModelShape) -> str:
    parts = []
    full = [group for group in shape.groups if group.kind is Kind.FULL]
    if full:
        labels = " and ".join(dict.fromkeys(group.label for group in full))
        size = format_bytes(shape.full_bytes_per_token * _TOKENS)
        once = ", once for all GPUs that share the model" if shape.is_mla else ""
        parts.append(f"Every block ({labels}): {size} per {_TOKENS:,} tokens{once}.")
    if shape.partial_groups:
        labels = " and ".join(dict.fromkeys(group.label for group in shape.partial_groups))
        size = format_bytes(shape.checkpoint_bytes())
        most = "" if all(group.kind is Kind.STATE for group in shape.partial_groups) else "up to "
        parts.append(
            f"Checkpoints ({labels}) at {' and at '.join(_CHECKPOINTS)}: {most}{size} each."
        )
    if any(group.kind is Kind.STATE for group in shape.groups):
        parts.append("States need vLLM's prefix caching (--enable-prefix-caching).")
    parts.append("vLLM chooses the block sizes when it starts; only whole blocks are kept.")
    return " ".join(parts)
