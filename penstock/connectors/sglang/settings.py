"""The settings in SGLang's `--hicache-storage-backend-extra-config`, and the flags to start it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from penstock.config.options import OPTIONS, option
from penstock.connectors.settings import StoreSettings
from penstock.errors import ConfigError

STORAGE = "PenstockStorage"
MODULE = "penstock.connectors.sglang"
SECTION = "penstock"
EXTRA_CONFIG = "--hicache-storage-backend-extra-config"
# Keys beside ours that SGLang's controller takes out before it opens a store, or reads there.
_OF_SGLANG = frozenset(
    [
        *("backend_name", "module_path", "class_name", "interface_v1", "allocator"),
        *("prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token"),
        *("hicache_storage_pass_prefix_keys", "tp_lcm_size"),
    ]
)


@dataclass(frozen=True, slots=True)
class SglangSettings(StoreSettings):
    """Settings of the store below SGLang, named as the options of `penstock serve`."""

    found_in: ClassVar[str] = f'"{SECTION}" in {EXTRA_CONFIG}'
    flags: ClassVar[tuple[str, ...]] = (
        *("weights_stay", "trust_media_names", "allow_untested_sglang"),
    )

    trust_media_names: bool = option(
        False,
        "Promise that clients give each image or other medium a name of its own, if they name it "
        "(mm_hashes). KV of multimodal models is then found after a restart.",
    )
    allow_untested_sglang: bool = option(
        False, "Allow SGLang versions that Penstock has not been tested with."
    )

    @classmethod
    def of(cls, extra_config: Mapping[str, Any] | None) -> SglangSettings:
        """Read what SGLang passes on. Raises ConfigError."""
        given = dict(extra_config or {})
        section = given.pop(SECTION, {})
        if not isinstance(section, Mapping):
            raise ConfigError(
                f"{SECTION} in {EXTRA_CONFIG} is {section!r}: expected settings by name; correct it"
            )
        names = {field.name for field in fields(cls)}
        for key in given:
            if key in names:
                raise ConfigError(
                    f"{key} is at the top of {EXTRA_CONFIG}: expected it inside "
                    f'"{SECTION}": {{...}}; move it there, or use `penstock sglang-config`'
                )
            if key not in _OF_SGLANG:
                raise ConfigError(
                    f"unknown key {key!r} in {EXTRA_CONFIG}: expected those of SGLang's controller "
                    f'and "{SECTION}"; remove it'
                )
        return cls.read(section)


def extra_config(settings: SglangSettings, names: Mapping[str, str] = OPTIONS) -> dict[str, Any]:
    """The value of SGLang's flag. Raises ConfigError if the settings are invalid."""
    settings.tiers(names)
    return {
        "backend_name": "penstock",
        "module_path": MODULE,
        "class_name": STORAGE,
        "interface_v1": 1,
        SECTION: settings.extra(),
    }


def flags(settings: SglangSettings, names: Mapping[str, str] = OPTIONS) -> list[str]:
    """The flags for `sglang serve`, as a list of arguments without spaces."""
    line = json.dumps(extra_config(settings, names), separators=(",", ":"), allow_nan=False)
    # A shell that splits an unquoted $(penstock sglang-config) must leave it whole.
    for character in " *?":
        line = line.replace(character, f"\\u{ord(character):04x}")
    return [
        "--enable-hierarchical-cache",
        "--hicache-storage-backend",
        "dynamic",
        EXTRA_CONFIG,
        line,
    ]
