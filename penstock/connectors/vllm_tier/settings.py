"""The settings of a secondary tier, beside its `type` and `module_path`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock.connectors.settings import StoreSettings


@dataclass(frozen=True, slots=True)
class VllmTierSettings(StoreSettings):
    """Named as the options of `penstock serve`. Sizes are in GiB."""

    found_in: ClassVar[str] = "a secondary tier's configuration"
