"""Tiers that pack blocks: what comes back is what was saved, whatever codec each tier has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tools import keys_of

from penstock.build import build_offloader, tier_codecs
from penstock.codecs.blocks import BlockValues, PartValues, TierCodecs, choose_names
from penstock.codecs.layout import KvLayout
from penstock.codecs.names import loss_of
from penstock.config import Config, DiskConfig, HostConfig, RemoteConfig
from penstock.engine.parts import block_values
from penstock.errors import ConfigError
from penstock.offload import Offloader
from penstock.stores.host import HostArena
from penstock.types import BlockKey, BlockSpec, Slot, Tier, Verdict
from penstock.units import MiB

LAYOUT = KvLayout.of_engine("bfloat16", 2, 16, 2, 64)
HALF = LAYOUT.num_bytes // 4  # keys or values of one layer
VALUES = BlockValues((PartValues(LAYOUT.num_bytes, "bfloat16", (HALF,) * 4, 64, LAYOUT),))
SPEC = BlockSpec(bytes(range(32)), LAYOUT.num_bytes, 16)
NUM = 24


def _content(key: BlockKey) -> bytes:
    rng = np.random.default_rng(list(key[:8]))
    values = rng.standard_normal(LAYOUT.num_values).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


class Tiers:
    def __init__(self, config: Config) -> None:
        self.device = HostArena(SPEC, NUM * SPEC.stride_bytes, huge_pages=False)
        self.codecs = tier_codecs(config, VALUES)
        self.offloader: Offloader = build_offloader(config, SPEC, self.device, codecs=self.codecs)

    def save(self, keys: list[BlockKey], contents: list[bytes] | None = None) -> list[Verdict]:
        slots = [Slot(index) for index in range(len(keys))]
        for slot, content in zip(slots, contents or map(_content, keys), strict=True):
            self.device.view(slot)[: len(content)] = content
        (done,) = self.offloader.wait([self.offloader.save(keys, slots)])
        self.offloader.drain()
        return list(done.verdicts)

    def load(self, keys: list[BlockKey]) -> tuple[list[Verdict], list[bytes]]:
        slots = [Slot(index) for index in range(len(keys))]
        for slot in slots:
            self.device.view(slot)[:] = bytes(SPEC.stride_bytes)
        (done,) = self.offloader.wait([self.offloader.load(keys, slots)])
        self.offloader.drain()
        found = [bytes(self.device.view(slot)[: SPEC.block_bytes]) for slot in slots]
        return list(done.verdicts), found


@contextmanager
def _tiers(
    host: str, disk: str = "", remote: str = "", path: Path | None = None, url: str = ""
) -> Iterator[Tiers]:
    config = Config(
        HostConfig(size_bytes=2 * MiB, huge_pages=False, codec=host),
        DiskConfig(path=str(path), size_bytes=64 * MiB, codec=disk) if disk else DiskConfig(),
        remote=RemoteConfig(url=url, codec=remote, lookup_deadline_seconds=10)
        if remote
        else RemoteConfig(),
    )
    tiers = Tiers(config)
    try:
        yield tiers
    finally:
        assert tiers.offloader.close()


EXACT = ["raw", "lossless"]


@pytest.mark.parametrize("host", EXACT)
@pytest.mark.parametrize("disk", ["auto", *EXACT])
def test_exact_from_dram_from_disk_and_after_a_restart(
    host: str, disk: str, tmp_path: Path
) -> None:
    keys = keys_of(NUM)
    wanted = list(map(_content, keys))
    with _tiers(host, disk, path=tmp_path) as tiers:
        assert tiers.save(keys) == [Verdict.OK] * NUM
        assert tiers.load(keys) == ([Verdict.OK] * NUM, wanted)
        tiers.offloader.empty_host()
        assert tiers.offloader.where(keys) == [Tier.DISK] * NUM
        assert tiers.load(keys) == ([Verdict.OK] * NUM, wanted)
        tiers.offloader.check()
    with _tiers(host, disk, path=tmp_path) as tiers:
        tiers.offloader.recover()
        assert tiers.offloader.where(keys) == [Tier.DISK] * NUM
        assert tiers.load(keys) == ([Verdict.OK] * NUM, wanted)


@pytest.mark.parametrize("host", EXACT)
@pytest.mark.parametrize("remote", EXACT)
def test_exact_through_a_shared_store(host: str, remote: str) -> None:
    keys = keys_of(NUM)
    url = f"memory://codecs-{host}-{remote}"
    with _tiers(host, remote=remote, url=url) as one:
        assert one.save(keys) == [Verdict.OK] * NUM
        # Another instance with another codec in DRAM shares what the store holds.
        with _tiers("raw" if host == "lossless" else "lossless", remote=remote, url=url) as two:
            lookup = two.offloader.lookup(keys)
            assert lookup is not None
            while two.offloader.is_looking_up(lookup):
                two.offloader.step()
            verdicts, found = two.load(keys)
            assert verdicts == [Verdict.OK] * NUM
            assert found == list(map(_content, keys))


@pytest.mark.parametrize(("disk", "other"), [("raw", "lossless"), ("lossless", "raw")])
def test_a_folder_with_another_codec_is_never_misread(
    disk: str, other: str, tmp_path: Path
) -> None:
    keys = keys_of(4)
    with _tiers("raw", disk, path=tmp_path) as tiers:
        tiers.save(keys)
    with _tiers("raw", other, path=tmp_path) as tiers:
        tiers.offloader.recover()
        assert tiers.offloader.where(keys) == [None] * 4
        tiers.save(keys)
    with _tiers("raw", disk, path=tmp_path) as tiers:  # and the first one is still there
        tiers.offloader.recover()
        assert tiers.load(keys) == ([Verdict.OK] * 4, list(map(_content, keys)))


@pytest.mark.parametrize(("host", "disk"), [("lossless", "lossless"), ("lossless", "raw")])
def test_a_block_that_does_not_fit_is_not_kept(host: str, disk: str, tmp_path: Path) -> None:
    keys = keys_of(3)
    wild = np.random.default_rng(0).integers(0, 1 << 16, LAYOUT.num_values).astype(np.uint16)
    contents = [_content(keys[0]), wild.tobytes(), _content(keys[2])]
    with _tiers(host, disk, path=tmp_path) as tiers:
        assert tiers.save(keys, contents) == [Verdict.OK, Verdict.UNFIT, Verdict.OK]
        assert tiers.offloader.where(keys) == [Tier.HOST, None, Tier.HOST]
        assert tiers.offloader.match(keys).num_blocks == 1
        tiers.offloader.check()
        assert tiers.save(keys) == [Verdict.OK] * 3, "other values under this key fit"


def test_a_folder_with_this_kv_in_another_codec_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.SPEC", replace(SPEC, description=(("model", "m"),)))
    with _tiers("raw", "auto", path=tmp_path):
        pass
    with _tiers("raw", "auto", path=tmp_path):
        assert "disk.codec" not in caplog.text
    with _tiers("lossless", "auto", path=tmp_path):
        assert 'set disk.codec to "raw"' in caplog.text
    caplog.clear()
    with _tiers("lossless", "auto", path=tmp_path):
        assert "disk.codec" not in caplog.text, "it is told once"


def test_a_block_that_does_not_fit_the_disk_stays_in_dram(tmp_path: Path) -> None:
    keys = keys_of(2)
    wild = np.random.default_rng(0).integers(0, 1 << 16, LAYOUT.num_values).astype(np.uint16)
    with _tiers("raw", "lossless", path=tmp_path) as tiers:
        contents = [wild.tobytes(), _content(keys[1])]
        assert tiers.save(keys, contents) == [Verdict.OK] * 2
        assert tiers.load(keys) == ([Verdict.OK] * 2, contents)
        tiers.offloader.empty_host()
        assert tiers.offloader.where(keys) == [None, Tier.DISK]
        tiers.offloader.check()


def test_a_raw_block_on_disk_that_does_not_fit_dram_is_a_miss(tmp_path: Path) -> None:
    keys = keys_of(2)
    wild = np.random.default_rng(0).integers(0, 1 << 16, LAYOUT.num_values).astype(np.uint16)
    with _tiers("raw", "raw", path=tmp_path) as tiers:
        tiers.save(keys, [wild.tobytes(), _content(keys[1])])
    with _tiers("lossless", "raw", path=tmp_path) as tiers:
        tiers.offloader.recover()
        verdicts, found = tiers.load(keys)
        assert verdicts == [Verdict.UNFIT, Verdict.OK]
        assert found[1] == _content(keys[1])
        tiers.offloader.check()


@pytest.mark.parametrize("codec", ["fp8", "int8", "int4"])
def test_lossy_tiers_give_the_same_bytes_every_time(codec: str, tmp_path: Path) -> None:
    keys = keys_of(4)
    with _tiers("raw", codec, path=tmp_path) as tiers:
        assert tiers.save(keys) == [Verdict.OK] * 4
        assert tiers.load(keys)[1] == list(map(_content, keys))
        tiers.offloader.empty_host()
        verdicts, first = tiers.load(keys)
        assert verdicts == [Verdict.OK] * 4
        assert first != list(map(_content, keys))
    with _tiers("raw", codec, path=tmp_path) as tiers:
        tiers.offloader.recover()
        assert tiers.load(keys)[1] == first
    with _tiers(codec, "auto", path=tmp_path) as tiers:
        tiers.offloader.recover()
        assert tiers.load(keys) == ([Verdict.OK] * 4, first), "its folder is the same"


@pytest.mark.parametrize(
    ("layers", "tokens", "kv_heads", "head_dim"),
    [(32, 16, 8, 128), (30, 64, 3, 64), (30, 16, 3, 64), (48, 16, 4, 128), (32, 16, 32, 96)],
)
def test_dram_holds_more_packed_blocks(
    layers: int, tokens: int, kv_heads: int, head_dim: int
) -> None:
    values = block_values("bfloat16", layers, tokens, kv_heads, head_dim, on_gpu=True)
    spec = BlockSpec(bytes(32), values.parts[0].num_bytes, tokens)
    packed = TierCodecs.choose({Tier.HOST: "auto"}, values).spec(Tier.HOST, spec)
    size = 64 << 30
    assert size // packed.stride_bytes >= 1.28 * (size // spec.stride_bytes)


def test_the_namespace_of_a_store_contains_its_codec() -> None:
    codecs = {name: TierCodecs(VALUES.open(name)) for name in ("raw", "lossless", "fp8", "int4")}
    specs = {name: codec.spec(Tier.HOST, SPEC) for name, codec in codecs.items()}
    assert specs["raw"] == SPEC, "stores of before stay valid"
    assert len({spec.namespace for spec in specs.values()}) == 4
    assert ("codec", "lossless") in specs["lossless"].description


def test_auto() -> None:
    on_gpu = BlockValues(VALUES.parts, on_gpu=True)
    settings = {Tier.HOST: "auto", Tier.DISK: "auto", Tier.REMOTE: "int8"}
    assert list(choose_names(settings, on_gpu).values()) == ["lossless", "lossless", "int8"]
    assert list(choose_names(settings, VALUES).values()) == ["raw", "raw", "int8"]
    half = BlockValues((PartValues(LAYOUT.num_bytes, "float16", (HALF,) * 4, 64),), on_gpu=True)
    assert choose_names(settings, half)[Tier.HOST] == "raw"
    # Attention could not read these rows in DRAM.
    small = BlockValues((PartValues(LAYOUT.num_bytes, "bfloat16", (HALF,) * 4, 16),), on_gpu=True)
    assert choose_names(settings, small)[Tier.HOST] == "raw"


@pytest.mark.parametrize(
    ("dtype", "codec", "why"),
    [
        ("float16", "lossless", "packs bfloat16, and this KV is float16"),
        ("", "lossless", "type of the KV's values is not known"),
        ("bfloat16", "int8", "order of the KV's values in memory is not known"),
    ],
)
def test_a_codec_that_does_not_apply_is_refused(dtype: str, codec: str, why: str) -> None:
    values = BlockValues((PartValues(LAYOUT.num_bytes, dtype, (HALF,) * 4),))
    with pytest.raises(ConfigError, match=f"host.codec: .*{why}.*choose"):
        TierCodecs.choose({Tier.HOST: codec}, values)


def test_loss_is_that_of_all_tiers() -> None:
    assert loss_of(["raw", "lossless"]) == ""
    assert loss_of(["raw", "int8", "fp8", "int8"]) == "fp8,int8"
