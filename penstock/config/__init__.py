"""User settings: those of the tiers, the options of the engine, and how URLs are shown."""

from penstock.config.load import as_typed, describe, load_config
from penstock.config.settings import (
    ENV_API_KEY,
    ENV_REMOTE_SECRET,
    POLICIES,
    Config,
    DiskConfig,
    HostConfig,
    NodeConfig,
    RemoteConfig,
    TransferConfig,
)

__all__ = [
    "ENV_API_KEY",
    "ENV_REMOTE_SECRET",
    "POLICIES",
    "Config",
    "DiskConfig",
    "HostConfig",
    "NodeConfig",
    "RemoteConfig",
    "TransferConfig",
    "as_typed",
    "describe",
    "load_config",
]
