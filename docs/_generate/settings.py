"""Turn the tables of docs/configuration.md into a reference with types and limits from the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from penstock.config.settings import ENV_NAMES, SETTINGS
from penstock.units import format_bytes, parse_bytes

_ROW = re.compile(r"^\| `(?P<key>\w+)` \| (?P<default>.*?) \| (?P<meaning>.*) \|$")


class Setting(NamedTuple):
    section: str
    key: str
    default: str  # as docs/configuration.md writes it
    expected: str
    environment: str
    is_optional: bool

    @property
    def dotted(self) -> str:
        return f"{self.section}.{self.key}"


def all_settings() -> dict[str, Setting]:
    """Return every setting of the loader by its dotted name."""
    environment = {dotted: name for name, dotted in ENV_NAMES.items()}
    found = {}
    for dotted, (section, field) in SETTINGS.items():
        kind = field.metadata["kind"]
        key = dotted.partition(".")[2]
        default = _default(field.default, is_size=kind.from_text is parse_bytes)
        found[dotted] = Setting(
            section, key, default, kind.expected, environment[dotted], kind.optional
        )
    return found


def documented(markdown: str) -> Iterator[tuple[str, str, str]]:
    """Yield (dotted name, default, meaning) for every row of the page's tables."""
    section = ""
    for line in markdown.splitlines():
        if heading := re.match(r"^## `\[(\w+)\]`", line):
            section = heading[1]
        elif row := _ROW.match(line):
            yield f"{section}.{row['key']}", row["default"], row["meaning"]


def expanded(markdown: str) -> str:
    """Replace each table with one entry per setting, each with an anchor."""
    known = all_settings()
    lines: list[str] = []
    section = ""
    for line in markdown.splitlines():
        if heading := re.match(r"^## `\[(\w+)\]`", line):
            section = heading[1]
            lines.append(f"{line} {{ #{section} }}")
        elif row := _ROW.match(line):
            setting = known[f"{section}.{row['key']}"]
            lines += _entry(setting, row["default"], row["meaning"])
        elif section and re.match(r"^\|[ -]*(key|-)", line):
            continue
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def _entry(setting: Setting, default: str, meaning: str) -> list[str]:
    anchor = setting.dotted.replace(".", "-").replace("_", "-")
    sentence = meaning.replace(r"\|", "|")
    expected = setting.expected + (", or none" if setting.is_optional else "")
    return [
        f"### `{setting.dotted}` {{ #{anchor} }}",
        "",
        f"{sentence[:1].upper()}{sentence[1:]}.",
        "",
        f"Default {default} · {expected} · `{setting.environment}`",
        "{ .setting }",
        "",
    ]


def _default(value: Any, *, is_size: bool) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if is_size:
        return f"`{format_bytes(value).replace('.0 ', '').replace(' ', '')}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"
