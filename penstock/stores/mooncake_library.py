"""Mooncake's Python package: loading it, setting its timeouts, parsing its URLs."""

from __future__ import annotations

import importlib
import os
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from penstock.config.urls import shown_option
from penstock.errors import ConfigError
from penstock.install import not_installed

NO_SERVER = "P2PHANDSHAKE"
MIN_SEGMENT_BYTES = 16 << 20  # the library's minimum

_DEFAULTS = {
    "segment": "0",
    "host": "",
    "protocol": "tcp",
    "devices": "",
    "metadata": NO_SERVER,
    "metrics": "9003",
}


def set_bounds(seconds: float) -> None:
    """Set the library's timeouts: a call asks the master and then a peer, `seconds` for each."""
    whole, milli = str(max(1, int(seconds))), str(max(1, int(seconds * 1000)))
    for name, value in {
        "MC_RPC_TIMEOUT_MS": milli,
        "MC_RPC_CONNECT_TIMEOUT_MS": milli,
        "MC_HANDSHAKE_CONNECT_TIMEOUT": whole,
        "MC_TCP_STATUS_TIMEOUT_SEC": whole,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": whole,
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",  # the default is 20, and all threads wait meanwhile
    }.items():
        os.environ.setdefault(name, value)  # the user's settings win


def load_library() -> Any:
    # Read when the library is loaded. By default it logs every step to standard error.
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        return importlib.import_module("mooncake.store").MooncakeDistributedStore
    except ModuleNotFoundError:
        raise not_installed(["mooncake"], "mooncake", "this remote.url") from None
    except ImportError as error:
        raise ConfigError(
            f"Mooncake cannot be loaded ({error}): it needs shared libraries that are not "
            "installed; on Debian, run apt-get install libibverbs1 libnuma1 libcurl4"
        ) from None


def read_url(url: str) -> tuple[tuple[str, int], dict[str, str]]:
    """The master's address, and the options."""

    def unreadable(why: str) -> ConfigError:
        return ConfigError(
            f"the remote URL cannot be read ({why}): expected mooncake://master:50051, "
            f"with options such as ?segment=4GiB; the options are {', '.join(_DEFAULTS)}"
        )

    try:
        parts = urlsplit(url)
        master = (parts.hostname or "", parts.port or 50051)
        given = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        options = {**_DEFAULTS, **dict(given)}
        int(options["metrics"])
    except ValueError:  # its message may contain a secret
        raise unreadable("a port or an option is wrong") from None
    if parts.scheme != "mooncake" or not master[0] or parts.username or parts.path.strip("/"):
        raise unreadable("it must consist of a scheme, a host and a port")
    if options.keys() != _DEFAULTS.keys():
        unknown = sorted(options.keys() - _DEFAULTS.keys())
        raise unreadable(f"unknown options: {', '.join(map(shown_option, unknown))}")
    if options["protocol"] not in ("tcp", "rdma"):
        raise unreadable("the protocol must be tcp or rdma")
    return master, options
