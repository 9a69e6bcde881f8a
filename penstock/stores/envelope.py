"""The byte format of a block in a shared store: a head that authenticates, and a body.

    offset  bytes  field (numbers are little-endian)
    0       8      b"PENSTOCK"
    8       2      format version, 1
    10      2      flags: 1 = the body is encrypted, 2 = its sum is an XXH3-128
    12      4      0
    16      8      bytes of the body
    24      8      written, in seconds since 1970
    32      8      expires, likewise; 0 = never
    40      32     namespace (physical)
    72      32     key
    104     12     nonce; 0 where nothing is encrypted
    116     12     0
    128     32     checksum of the body: keyed BLAKE3; without a secret XXH3-128, which is ten
                   times faster, and 0; of an encrypted body the GCM tag, and 0
    160     32     keyed BLAKE3 of all bytes above
    192            the body

Both checksums are keyed by the fleet's secret: without the secret, nobody can write a value that
is accepted. If there is no secret, damage is detected but forgery is not. The names of values
depend on the secret too: fleets with different secrets neither see nor delete each other's values.

An encrypted body has as many bytes as a plain one: AES-256-GCM, under a key derived from secret,
tenant and block key, with a random nonce and bytes 0 to 128 of the head as associated data.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import xxhash
from blake3 import blake3

from penstock.errors import ConfigError, Corrupt, Missing, StoreError
from penstock.install import not_installed
from penstock.types import BlockKey, BlockSpec
from penstock.units import counted

HEAD_BYTES = 192
MIN_SECRET_BYTES = 16

_MAGIC = b"PENSTOCK"
_VERSION = 1
_ENCRYPTED = 1
_PLAIN_SUM = 2
_FIELDS = struct.Struct("<8sHHIQQQ32s32s12s12x")
_BODY_SUM = slice(128, 160)
_SEAL = slice(160, 192)
_TAG_BYTES = 16
_NONCE_BYTES = 12
_PUBLIC_KEY = blake3(b"penstock: no fleet secret").digest()


class HeadFacts(NamedTuple):
    """What a head says about its value. Only an `Envelope` can verify it."""

    namespace: bytes
    key: BlockKey
    block_bytes: int
    written: int  # seconds since 1970
    expires: int | None  # likewise; None if never
    encrypted: bool


def read_head(head: bytes) -> HeadFacts | None:
    """Parse a head without verifying it. None if it has another format."""
    if len(head) != HEAD_BYTES:
        return None
    fields = _FIELDS.unpack_from(head)
    magic, version, flags, _, length, written, expires, namespace, key, _ = fields
    if magic != _MAGIC or version != _VERSION:
        return None
    encrypted = bool(flags & _ENCRYPTED)
    return HeadFacts(namespace, BlockKey(key), length, written, expires or None, encrypted)


class Envelope:
    """Packs and judges values of one namespace, under one fleet's secret."""

    def __init__(
        self,
        spec: BlockSpec,
        *,
        secret: bytes = b"",
        encrypt: bool = False,
        ttl_seconds: float | None = None,
    ) -> None:
        if secret and len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"the fleet's secret has {counted(len(secret), 'byte')}: expected at least "
                f"{MIN_SECRET_BYTES}; create one with: openssl rand -hex 32"
            )
        if encrypt and not secret:
            raise ConfigError(
                "remote.encrypt is set without a secret: expected one in PENSTOCK_REMOTE_SECRET; "
                "create it with: openssl rand -hex 32"
            )
        self._spec = spec
        self._has_secret = bool(secret)
        self._ttl_seconds = ttl_seconds
        self._key = _PUBLIC_KEY
        if secret:
            self._key = blake3(secret, derive_key_context="penstock remote sums").digest()
        self._new_cipher = _cipher_maker(secret) if encrypt else None
        purpose = b"penstock remote names 1" + bytes([encrypt])
        self.prefix = blake3(purpose + spec.namespace, key=self._key).hexdigest()[:32]

    @property
    def encrypts(self) -> bool:
        return self._new_cipher is not None

    def digest(self, body: memoryview) -> bytes:
        """The checksum of a plain body, for the head. No I/O; releases the GIL."""
        if self.encrypts:
            return b""  # the head has the cipher's tag instead
        if not self._has_secret:
            return xxhash.xxh3_128_digest(body) + bytes(16)
        return blake3(body, key=self._key).digest()

    def pack(self, key: BlockKey, digest: bytes, now: float) -> bytes:
        """The head of a plain body."""
        flags = 0 if self._has_secret else _PLAIN_SUM
        return self._sealed(self._fields(key, now, flags, bytes(_NONCE_BYTES)) + digest)

    def encrypt(
        self, key: BlockKey, tenant: str, body: memoryview, now: float
    ) -> tuple[bytes, memoryview]:
        """The head and the encrypted body."""
        assert self._new_cipher is not None
        nonce = os.urandom(_NONCE_BYTES)
        fields = self._fields(key, now, _ENCRYPTED, nonce)
        sealed = memoryview(self._new_cipher(key, tenant).encrypt(nonce, body, fields))
        tag = bytes(sealed[-_TAG_BYTES:]) + bytes(_TAG_BYTES)
        return self._sealed(fields + tag), sealed[:-_TAG_BYTES]

    def open(
        self, key: BlockKey, tenant: str, head: bytes, body: memoryview, now: float
    ) -> StoreError | None:
        """Verify a value. None if `body` now holds the block; else `body` must not be used."""
        error = self.judge_head(key, head, now)
        if error is not None:
            return error
        if self._new_cipher is None:
            sound = self.digest(body) == head[_BODY_SUM]
            return None if sound else Corrupt("the body of a remote value fails its checksum")
        nonce = _FIELDS.unpack_from(head)[9]
        tag = head[_BODY_SUM][:_TAG_BYTES]
        cipher = self._new_cipher(key, tenant)
        try:
            body[:] = cipher.decrypt(nonce, bytes(body) + tag, head[: _BODY_SUM.start])
        except Exception:  # usually InvalidTag; on any error the body must not be used
            return Corrupt("a remote value cannot be decrypted: it is damaged or of another tenant")
        return None

    def judge_head(self, key: BlockKey, head: bytes, now: float) -> StoreError | None:
        """Verify a head without its body."""
        magic, version, flags, _, length, _, expires, namespace, held, _ = _FIELDS.unpack_from(head)
        if magic != _MAGIC or version != _VERSION:
            return Corrupt("a remote value has another format")
        if blake3(head[: _SEAL.start], key=self._key).digest() != head[_SEAL]:
            return Corrupt("the head of a remote value fails its checksum")
        if namespace != self._spec.namespace or length != self._spec.block_bytes:
            return Corrupt("a remote value has another namespace or size")
        if held != key:
            return Corrupt("a remote value belongs to another block")
        if bool(flags & _ENCRYPTED) is not self.encrypts:
            found, wanted = ("not ", "") if self.encrypts else ("", "not ")
            return Corrupt(f"a remote value is {found}encrypted, but remote.encrypt is {wanted}set")
        if expires and now >= expires:
            return Missing("a remote value has expired")
        return None

    def _fields(self, key: BlockKey, now: float, flags: int, nonce: bytes) -> bytes:
        expires = 0 if self._ttl_seconds is None else int(now + self._ttl_seconds)
        return _FIELDS.pack(
            _MAGIC,
            _VERSION,
            flags,
            0,
            self._spec.block_bytes,
            int(now),
            expires,
            self._spec.namespace,
            key,
            nonce,
        )

    def _sealed(self, above: bytes) -> bytes:
        return above + blake3(above, key=self._key).digest()


def _cipher_maker(secret: bytes) -> Callable[[BlockKey, str], Any]:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise not_installed(["cryptography"], "encryption", "remote.encrypt") from None

    def make(key: BlockKey, tenant: str) -> Any:
        name = tenant.encode()
        material = secret + len(name).to_bytes(8, "little") + name + key
        return AESGCM(blake3(material, derive_key_context="penstock remote cipher").digest())

    return make
