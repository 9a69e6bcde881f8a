"""Reads hints from a request's `kv_transfer_params`, under the key "penstock"."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from penstock.errors import ConfigError
from penstock.hints import NO_HINTS, Hints

log = logging.getLogger(__name__)

KEY = "penstock"


class TransferParamHints:
    """Invalid hints are ignored with one warning: no request fails because of a hint."""

    def __init__(self) -> None:
        self._has_warned = False

    def of(self, request: Any) -> Hints:
        params = getattr(request, "kv_transfer_params", None)
        if not isinstance(params, Mapping) or KEY not in params:
            return NO_HINTS
        try:
            return Hints.of(params[KEY])
        except ConfigError as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning("Invalid hints in kv_transfer_params are ignored: %s", error)
            return NO_HINTS
