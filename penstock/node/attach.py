"""Attach to the node that the settings name, in place of opening tiers in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from penstock.build import Delegated
from penstock.clock import SystemClock
from penstock.codecs.base import BlockCodec
from penstock.codecs.blocks import BlockValues, TierCodecs
from penstock.config import Config
from penstock.errors import ConfigError
from penstock.events import Observer
from penstock.node.client import NodeTiers
from penstock.node.connection import NodeEnded, NodeSettings, socket_path
from penstock.node.delegated import DelegatedNodeTiers, NodeLink
from penstock.node.handshake import open_node
from penstock.node.wire import Channel
from penstock.stores.base import Arena
from penstock.stores.host import HostArena
from penstock.transfer.base import Transfers
from penstock.transfer.engine import TransferEngine
from penstock.transfer.io import CopyMover, Mover
from penstock.transfer.lanes import LaneSpec
from penstock.transfer.seals import Seals
from penstock.types import BlockSpec, Tier

_AGAIN_SECONDS = 5.0  # to attach again, by a client that has work to do

_Tiers = TypeVar("_Tiers", bound=NodeTiers)

DeviceMover = Callable[[HostArena, Seals, BlockCodec], Mover]


class NodeOpening:
    """A node that was found. Its codecs decide a client's keys, and these where it attaches."""

    def __init__(self, config: Config) -> None:
        """Wait for the node as long as the settings say. Raises ConfigError."""
        assert config.node.url is not None
        self._config = config
        self._path = socket_path(config.node.url)
        self._channel: Channel | None
        self.settings: NodeSettings
        self._channel, self.settings = open_node(self._path, config.node.wait_seconds)

    def codecs(self, values: BlockValues) -> TierCodecs:
        """The codecs that the node's settings choose. Raises ConfigError."""
        return TierCodecs.choose(self.settings.codecs, values)

    def attach(
        self,
        spec: BlockSpec,
        device: Arena,
        values: BlockValues,
        *,
        observers: Iterable[Observer] = (),
        device_mover: DeviceMover | None = None,
        name: str = "",
    ) -> NodeTiers:
        """For a client that copies in this process. Raises ConfigError."""
        movers: list[Mover] = []

        def make_copies(
            host: HostArena, seals: Seals, codec: BlockCodec, notify: Callable[[], None]
        ) -> Transfers:
            mover: Mover
            if device_mover is None:
                mover = CopyMover(device, host, seals, codec)
            else:
                mover = device_mover(host, seals, codec)
            movers.append(mover)
            lane = LaneSpec(mover, self._config.transfer.copy_threads)
            # The node's books limit what is pending, so this queue needs no limit of its own.
            return TransferEngine(
                {Tier.HOST: lane}, SystemClock(), max_queued=1 << 30, notify=notify
            )

        codecs = self.codecs(values)
        return self._attached(
            lambda channel: NodeTiers(
                self._path,
                channel,
                self.settings,
                spec,
                values,
                codecs,
                make_copies,
                name=name,
                in_one=device_mover is not None,
                observers=observers,
                remap=lambda replace_memory: movers[0].remap(replace_memory),
            )
        )

    def attach_delegated(
        self,
        spec: BlockSpec,
        num_workers: int,
        values: BlockValues,
        *,
        observers: Iterable[Observer] = (),
        name: str = "",
    ) -> Delegated:
        """For a client whose copies are made by `num_workers` others, which `join` the node.

        A block holds one part per worker. Raises ConfigError.
        """
        links: list[NodeLink] = []

        def make_copies(
            host: HostArena, seals: Seals, codec: BlockCodec, notify: Callable[[], None]
        ) -> Transfers:
            links.append(NodeLink(seals, num_workers))
            return links[0]

        codecs = self.codecs(values)
        tiers = self._attached(
            lambda channel: DelegatedNodeTiers(
                self._path,
                channel,
                self.settings,
                spec,
                values,
                codecs,
                make_copies,
                name=name,
                observers=observers,
            )
        )
        return Delegated(tiers, links[0], tiers.handle, tiers)

    def close(self) -> None:
        """If it was not attached to after all."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _attached(self, attach: Callable[[Channel], _Tiers]) -> _Tiers:
        """Attach; if the node ends meanwhile, to the next one."""
        wait_seconds = self._config.node.wait_seconds
        if self._channel is None:
            wait_seconds = min(_AGAIN_SECONDS, wait_seconds)
        deadline = time.monotonic() + wait_seconds
        while True:
            channel = self._take_channel(deadline)
            try:
                return attach(channel)
            except NodeEnded as error:
                if time.monotonic() >= deadline:
                    raise ConfigError(f"the node at {self._path}: {error}") from None

    def _take_channel(self, deadline: float) -> Channel:
        channel, self._channel = self._channel, None
        if channel is None or channel.is_closed:
            wait_seconds = max(0.0, deadline - time.monotonic())
            channel, settings = open_node(self._path, wait_seconds)
            if settings.codecs != self.settings.codecs:
                channel.close()
                raise ConfigError(
                    f"the codecs of the node at {self._path} have changed: expected the same as "
                    "when this process was started; restart it."
                )
            self.settings = settings
        return channel


def host_codec(config: Config) -> str:
    """The setting host.codec: the node's, if there is one. Raises ConfigError."""
    if config.node.url is None:
        return config.host.codec
    node = NodeOpening(config)
    node.close()
    return node.settings.codecs[Tier.HOST]
