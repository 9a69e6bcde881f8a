"""The tokens that open a turn in a model's chat format, from the files in the model's folder.

They show where prompts are likely to branch: after the system prompt, and where each turn or tool
message begins. Only the choice of checkpoints depends on them, never what is right. So a folder
that cannot be read, or has no chat template, gives no tokens and no error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# A token opens a turn if its name has one of these words ...
_OPENING = {
    *("start", "turn", "role", "header", "inst", "user", "human", "assistant", "system"),
    *("developer", "observation", "tool", "tools"),
}
# ... and none of these: ends, calls (they are part of an answer), thoughts, media.
_OTHER = {
    *("end", "eot", "eos", "eom", "bos", "pad", "mask", "call", "calls", "think", "thinking"),
    *("image", "vision", "audio", "video", "fim"),
}


def border_ids(folder: Path | str) -> frozenset[int]:
    """The ids of the tokens that open a turn; empty if the model's files do not tell."""
    folder = Path(folder)
    config = _read_json(folder / "tokenizer_config.json")
    templates = "\n".join(_templates(folder, config))
    if not templates:
        return frozenset()
    return frozenset(
        number
        for number, content in _added_tokens(folder, config)
        if content in templates and opens_turn(content)
    )


def opens_turn(content: str) -> bool:
    """Whether a token with this text opens a turn or a tool message, by its name."""
    is_closing = "/" in content or (content.endswith("|>") and content[:2] not in ("<|", "<｜"))
    words = set(re.findall(r"[a-z]+", content.lower()))
    return not is_closing and bool(words & _OPENING) and not words & _OTHER


def _templates(folder: Path, config: dict[str, Any]) -> Iterator[str]:
    """The model's chat templates. Some models have several, for instance one for tools."""
    found = [
        _read(folder / "chat_template.jinja"),
        _read_json(folder / "chat_template.json").get("chat_template"),
        config.get("chat_template"),
    ]
    for each in found:
        if isinstance(each, list):
            named = [item.get("template") for item in each if isinstance(item, dict)]
            yield from (text for text in named if isinstance(text, str))
        elif isinstance(each, str):
            yield each


def _added_tokens(folder: Path, config: dict[str, Any]) -> Iterator[tuple[int, str]]:
    """The tokens that are one id each, whatever the text around them."""
    decoder: Any = config.get("added_tokens_decoder")
    if not isinstance(decoder, dict) or not decoder:
        # Read only if needed: it holds the whole vocabulary.
        added = _read_json(folder / "tokenizer.json").get("added_tokens")
        entries = added if isinstance(added, list) else []
        decoder = {each.get("id"): each for each in entries if isinstance(each, dict)}
    for number, each in decoder.items():
        content = each.get("content") if isinstance(each, dict) else None
        if isinstance(content, str) and content and str(number).isdecimal():
            yield int(number), content


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_read(path) or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
