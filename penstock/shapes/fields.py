"""The fields of one config.json, with errors that name the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import ConfigError
from penstock.shapes.shape import is_count

_BITS = {
    **dict.fromkeys(("bfloat16", "bf16", "float16", "fp16", "half"), 16),
    **dict.fromkeys(("float32", "fp32", "float"), 32),
}


@dataclass(frozen=True, slots=True)
class ConfigFields:
    values: Mapping[str, Any]
    origin: str

    @property
    def kind(self) -> str:
        return str(self.values.get("model_type", ""))

    def count(self, *names: str) -> int:
        """The first of these fields that is given."""
        for name in names:
            if (value := self.maybe(name)) is not None:
                return value
        raise ConfigError(
            f"{self.origin} has no {names[0]}: expected the config.json of a decoder with "
            "attention; choose another file or a known model"
        )

    def maybe(self, name: str) -> int | None:
        """None if the field is missing or null."""
        value = self.values.get(name)
        if value is None:
            return None
        if not is_count(value):
            raise self.wrong(name, "expected a whole number above 0")
        return value

    def about(self, name: str) -> int:
        """0 if the field is missing or invalid: for estimates, which must not fail."""
        value = self.values.get(name)
        return value if is_count(value) else 0

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def bits(self, name: str, default: int) -> int:
        """The width of a dtype; `default` if it is missing or "auto"."""
        value = self.values.get(name)
        if value is None or value == "auto":
            return default
        dtype = str(value).removeprefix("torch.").lower()
        if dtype in _BITS:
            return _BITS[dtype]
        if dtype.startswith(("float8", "fp8")):
            return 8
        raise self.wrong(name, "expected bfloat16, float16, float32 or float8")

    def half_dtype(self, name: str) -> str:
        """float16 if the field says so; otherwise bfloat16, as engines use for 16 bits."""
        dtype = str(self.values.get(name)).removeprefix("torch.").lower()
        return "float16" if dtype in ("float16", "fp16", "half") else "bfloat16"

    def wrong(self, name: str, expected: str) -> ConfigError:
        value = repr(self.values.get(name))[:80]
        return ConfigError(f"{name} in {self.origin} is {value}: {expected}; correct the file")
