"""What Penstock will keep of a model in vLLM, from its config.json alone. vLLM is not needed."""

from __future__ import annotations

from typing import Any, NamedTuple

from penstock.commands.group_rows import describe_group, group_rows
from penstock.commands.vllm_checks import Check, Status, installed_vllm
from penstock.errors import ConfigError
from penstock.groups.kinds import Kind
from penstock.shapes.catalog import find_model
from penstock.shapes.shape import ModelShape
from penstock.shapes.sizing import find_shape
from penstock.units import counted, format_bytes

# Before it, vLLM cannot report a failed load of a model with several groups.
_SEVERAL_GROUPS_SINCE = (0, 30)
_TOKENS = 1000
_CHECKPOINTS = ("the end of the prompt", "the end of the answer")


class ExaminedModel(NamedTuple):
    checks: list[Check]
    facts: dict[str, Any]  # for JSON


def examine_model(model: str) -> ExaminedModel:
    """Check whether a model's layers can be restored, and say what will be kept of them."""
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
    facts = {
        "name": model,
        "is_supported": refusal is None,
        "refusal": refusal,
        "groups": group_rows(shape, _TOKENS),
        "bytes_per_1000_tokens": shape.full_bytes_per_token * _TOKENS,
        "checkpoint_bytes": shape.checkpoint_bytes(),
        "checkpoints_at": list(_CHECKPOINTS) if shape.partial_groups else [],
    }
    return ExaminedModel(checks, facts)


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
