"""Nothing that comes back from a shared store is believed unless it proves what it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools import content, key_of, spec

from penstock.errors import ConfigError, Corrupt, Missing
from penstock.stores.envelope import HEAD_BYTES, Envelope, HeadFacts, read_head

SPEC = spec(1000)
KEY = key_of("a")
BODY = content(KEY, 1000)
SECRET = b"a secret of the whole fleet"
NOW = 1_000_000.0


def packed(envelope: Envelope, tenant: str = "") -> tuple[bytes, bytes]:
    if envelope.encrypts:
        head, body = envelope.encrypt(KEY, tenant, memoryview(BODY), NOW)
        return head, bytes(body)
    return envelope.pack(KEY, envelope.digest(memoryview(BODY)), NOW), BODY


@pytest.fixture(params=[(b"", False), (SECRET, False), (SECRET, True)])
def envelope(request: pytest.FixtureRequest) -> Envelope:
    secret, encrypt = request.param
    return Envelope(SPEC, secret=secret, encrypt=encrypt, ttl_seconds=60)


def test_what_was_packed_is_believed(envelope: Envelope) -> None:
    head, body = packed(envelope, "x")
    assert len(head) == HEAD_BYTES
    assert len(body) == len(BODY)
    assert (body == BODY) is not envelope.encrypts
    memory = bytearray(body)
    assert envelope.open(KEY, "x", head, memoryview(memory), NOW) is None
    assert memory == BODY


@given(place=st.integers(0, HEAD_BYTES + len(BODY) - 1), bit=st.integers(0, 7))
@pytest.mark.parametrize(("secret", "encrypt"), [(b"", False), (SECRET, True)])
def test_no_bit_can_be_changed(secret: bytes, encrypt: bool, place: int, bit: int) -> None:
    envelope = Envelope(SPEC, secret=secret, encrypt=encrypt)
    head, body = packed(envelope)
    value = bytearray(head + body)
    value[place] ^= 1 << bit
    error = envelope.open(KEY, "", bytes(value[:HEAD_BYTES]), memoryview(value)[HEAD_BYTES:], NOW)
    assert isinstance(error, Corrupt)


def test_a_value_of_another_key_is_corrupt(envelope: Envelope) -> None:
    head, body = packed(envelope)
    error = envelope.open(key_of("b"), "", head, memoryview(bytearray(body)), NOW)
    assert isinstance(error, Corrupt)
    assert "another block" in str(error)


def test_a_value_of_another_namespace_is_corrupt_and_has_another_name(envelope: Envelope) -> None:
    other = Envelope(spec(1000, "other"))
    head, body = packed(other)
    assert isinstance(envelope.open(KEY, "", head, memoryview(bytearray(body)), NOW), Corrupt)
    assert envelope.prefix != other.prefix


def test_without_the_secret_no_value_can_be_forged() -> None:
    envelope, forger = Envelope(SPEC, secret=SECRET), Envelope(SPEC)
    head, body = packed(forger)
    assert isinstance(envelope.open(KEY, "", head, memoryview(bytearray(body)), NOW), Corrupt)


def test_fleets_of_different_secrets_do_not_see_each_other() -> None:
    prefixes = {
        Envelope(SPEC).prefix,
        Envelope(SPEC, secret=SECRET).prefix,
        Envelope(SPEC, secret=SECRET + b"!").prefix,
        Envelope(SPEC, secret=SECRET, encrypt=True).prefix,
    }
    assert len(prefixes) == 4


def test_a_tenant_cannot_read_what_another_wrote() -> None:
    envelope = Envelope(SPEC, secret=SECRET, encrypt=True)
    head, body = packed(envelope, "a")
    for tenant in ("b", "", "a "):
        memory = memoryview(bytearray(body))
        assert isinstance(envelope.open(KEY, tenant, head, memory, NOW), Corrupt)
        assert bytes(memory) == body


def test_the_same_block_is_never_encrypted_alike() -> None:
    envelope = Envelope(SPEC, secret=SECRET, encrypt=True)
    assert packed(envelope) != packed(envelope)


def test_what_has_expired_is_missing(envelope: Envelope) -> None:
    head, body = packed(envelope)
    assert envelope.open(KEY, "", head, memoryview(bytearray(body)), NOW + 59) is None
    error = envelope.open(KEY, "", head, memoryview(bytearray(body)), NOW + 60)
    assert isinstance(error, Missing)


def test_a_plain_value_is_not_taken_where_all_is_encrypted() -> None:
    plain, encrypted = Envelope(SPEC, secret=SECRET), Envelope(SPEC, secret=SECRET, encrypt=True)
    for writer, reader in ((plain, encrypted), (encrypted, plain)):
        head, body = packed(writer)
        assert isinstance(reader.open(KEY, "", head, memoryview(bytearray(body)), NOW), Corrupt)


def test_a_secret_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 16"):
        Envelope(SPEC, secret=b"short")
    with pytest.raises(ConfigError, match="PENSTOCK_REMOTE_SECRET"):
        Envelope(SPEC, encrypt=True)


def test_a_head_says_what_it_was_packed_with(envelope: Envelope) -> None:
    head, _ = packed(envelope)
    assert read_head(head) == HeadFacts(
        namespace=SPEC.namespace,
        key=KEY,
        block_bytes=1000,
        written=int(NOW),
        expires=int(NOW) + 60,
        encrypted=envelope.encrypts,
    )
    forever = read_head(packed(Envelope(SPEC))[0])
    assert forever is not None
    assert forever.expires is None


@given(head=st.binary(max_size=HEAD_BYTES + 1))
def test_what_is_no_head_says_nothing(head: bytes) -> None:
    assert read_head(head) is None


def test_a_head_cut_off_or_of_another_version_says_nothing(envelope: Envelope) -> None:
    head, _ = packed(envelope)
    assert read_head(head[:-1]) is None
    assert read_head(head + b"x") is None
    assert read_head(head[:8] + b"\2" + head[9:]) is None


def test_a_head_is_judged_without_its_body(envelope: Envelope) -> None:
    head, _ = packed(envelope)
    assert envelope.judge_head(KEY, head, NOW) is None
    assert isinstance(envelope.judge_head(key_of("b"), head, NOW), Corrupt)
    assert isinstance(envelope.judge_head(KEY, head, NOW + 60), Missing)
    damaged = head[:30] + bytes([head[30] ^ 1]) + head[31:]
    assert read_head(damaged) is not None  # it proves nothing
    assert isinstance(envelope.judge_head(KEY, damaged, NOW), Corrupt)
