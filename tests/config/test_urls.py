"""A password in a URL never shows, however the URL is written."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.config import Config, RemoteConfig, describe, load_config
from penstock.config.options import EngineOptions
from penstock.config.urls import HIDDEN, shown_value, without_password
from penstock.connectors.vllm.settings import VllmSettings
from penstock.errors import ConfigError, PenstockError
from penstock.stores.remotes import SCHEMES, open_client

# Letters and digits that occur nowhere else in the URLs below: each one seen is a leak.
SECRET = "QZ"
DIGITS = "89"
passwords = st.text(f"{SECRET}{DIGITS}?#@/:%&=;,[]\\+ .…", min_size=1, max_size=12).map(
    lambda p: f"Q{p}Z"
)
schemes = st.sampled_from([*SCHEMES, "http", "https"])
hosts = st.sampled_from(["h", "h:1", "[::1]:1", "h:1,g:2", "h.example.org", ""])
ends = st.sampled_from(["", "/", "/0", "/a/b", "?db=0", "/0?db=0&region=x", "#x"])
forms = st.sampled_from(
    [
        "{scheme}://user:{password}@{host}{end}",
        "{scheme}://:{password}@{host}{end}",
        "{scheme}://{password}@{host}{end}",
        "{scheme}://user:{no_at}:{host}{end}",  # with an "@" nobody could tell it from a host
        "{scheme}://u@v:{password}@{host}{end}",
        "{scheme}://{host}/0?password={password}",
        "{scheme}://{host}/0?db=0&sentinel_password={password}&region=x",
        "{scheme}://{host}?aws_secret_access_key={password}",
        "{scheme}://{host}?PASSWORD={password}",
        "{scheme}://{host}?{password}",
        "{scheme}://{host}?x&{password}=1",
        "{scheme}://{host}?endpoint=http://u:{password}@h",
        "{scheme}://user:{password}@{host}?password={password}",
        "{scheme}:/user:{password}@{host}{end}",
        "user:{password}@{host}{end}",
        "{password}@{host}",
    ]
)


def _fill(form: str, scheme: str, password: str, host: str, end: str, coded: bool) -> str:
    password = quote(password, safe="") if coded else password
    no_at = password.replace("@", "")
    return form.format(scheme=scheme, password=password, no_at=no_at, host=host, end=end)


urls = st.builds(_fill, forms, schemes, passwords, hosts, ends, st.booleans())


def assert_hidden(text: str) -> None:
    assert not set(text) & set(SECRET), text


@given(urls)
@example("redis://user:Q?Z@h/0")
@example("redis://user:Q#Z@h/0")
@example("redis://user:Q/Z@h/0")
@example("redis://user:8/9@h/0")
@example("redis://user:Q@Z@h/0")
@example("redis://user:Q@Z/Q@h/0")
@example("redis://h/0?password=Q@Z")
@example("redis://QZ@h")
@example("redis://Q:Z@h")
@example("redis+sentinel://u:Q?Z@h:1,g:2/mymaster/0?sentinel_password=QZ")
@example("unix://user:QZ@/run/redis.sock?db=0")
@example("s3://bucket?db=0;password=QZ")
def test_a_password_is_never_shown(url: str) -> None:
    assert_hidden(without_password(url))
    assert not set(without_password(url)) & set(DIGITS)
    assert_hidden(shown_value(url))
    assert_hidden(shown_value([url]))


@given(urls)
def test_nor_in_settings_and_what_they_say_of_themselves(url: str) -> None:
    assert_hidden(repr(EngineOptions(remote=url)))
    for give in (
        lambda: load_config(env={"PENSTOCK_REMOTE_URL": url}),
        lambda: load_config(env={}, overrides={"remote.url": url}),
        lambda: load_config(env={}, overrides={"remote.url": [url]}),
        lambda: load_config(env={}, overrides={"host.size": url}),
        lambda: load_config(env={}, overrides={url: "1"}),
        lambda: Config(remote=RemoteConfig(url=url)),
        lambda: VllmSettings.read({"remote": url}).tiers(),
        lambda: VllmSettings.read({"remote": [url]}).tiers(),
        lambda: VllmSettings.read({"set": url}).tiers(),
    ):
        try:
            config = give()
        except PenstockError as error:
            assert_hidden("".join(traceback.format_exception(error, limit=0)))
        else:
            assert_hidden(repr(config))
            assert_hidden(str(describe(config)))


@given(urls.filter(lambda url: not url.startswith("mooncake")))
@example("redis://user:Q?Z@h/0")
@example("redis://user:Q")
@example("redis://h:1?QZ=1")
@example("redis+sentinel://h:1/mymaster?QZ=1")
@example("redis+cluster://h:1?QZ=1")
@example("s3://bucket?QZ")
@example("s3://bucket?QZ=1")
def test_nor_by_the_client_libraries(url: str) -> None:
    """Whether they take it or not, at once or when they find nobody there."""
    try:
        client = open_client(url, 0.01)
    except ConfigError as error:
        assert_hidden("".join(traceback.format_exception(error, limit=0)))
    else:
        client.close()


@pytest.mark.parametrize(
    "url",
    [
        "mooncake://user:Q?Z@h",
        "mooncake://user:Q",
        "mooncake://h:1?QZ=1",
        "mooncake://h:1?QZ",
        "mooncake://h:1?metrics=QZ",
    ],
)
def test_nor_by_mooncakes(url: str) -> None:
    from penstock.stores.mooncake_library import read_url

    with pytest.raises(ConfigError) as caught:
        read_url(url)
    assert_hidden("".join(traceback.format_exception(caught.value, limit=0)))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:pw@h:6379/0", "redis://…@h:6379/0"),
        ("redis://h:6379/0?db=1&password=pw", "redis://h:6379/0?db=1&password=…"),
        ("redis+sentinel://a:1,b:2/mymaster/0", "redis+sentinel://a:1,b:2/mymaster/0"),
        ("rediss://user:pw@[fe80::1]:6379/0", "rediss://…@[fe80::1]:6379/0"),
        ("unix:///run/redis.sock?db=0", "unix:///run/redis.sock?db=0"),
        (
            "s3://bucket/a b?endpoint=http://minio:9000",
            "s3://bucket/a b?endpoint=http://minio:9000",
        ),
        ("mooncake://m:1?segment=4GiB&devices=a,b", "mooncake://m:1?segment=4GiB&devices=a,b"),
        ("file:///mnt/kv", "file:///mnt/kv"),
        ("memory://name?gb_per_second=0.5", "memory://name?gb_per_second=0.5"),
        ("http://foo", "http://foo"),
        ("redsi://foo", "redsi://foo"),
        ("redsi://user:pw@foo", "…"),
        ("redis://user:pa?ss@h/0", "redis://…"),
        ("not a URL", "…"),
    ],
)
def test_where_a_store_is_can_still_be_read(url: str, shown: str) -> None:
    assert without_password(url) == shown


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_is_known_here(scheme: str) -> None:
    assert without_password(f"{scheme}://user:pw@h") == f"{scheme}://…@h"


@pytest.mark.parametrize("odd", ["?", "#", "/", "[", " "])
def test_a_password_that_was_not_encoded_is_refused_with_what_to_do(odd: str) -> None:
    pytest.importorskip("redis")
    with pytest.raises(ConfigError, match=r"percent-encoded|cannot be read"):
        open_client(f"redis://user:pa{odd}ss", 0.01)
    with pytest.raises(ConfigError, match="percent-encoded"):
        open_client(f"redis://user:pa{odd}ss@h:6379#/0", 0.01)


def test_an_unknown_option_of_redis_is_refused_before_it_is_used() -> None:
    pytest.importorskip("redis")
    for url in ("redis://h?no=1", "redis+sentinel://h/m?no=1", "redis+cluster://h?no=1"):
        with pytest.raises(ConfigError, match="options of redis-py"):
            open_client(url, 0.01)


def test_a_store_that_is_away_is_told_without_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("redis")
    with caplog.at_level(logging.DEBUG):
        client = open_client("redis://user:Q%3FZ@127.0.0.1:1/0?password=QZ", 0.2)
        with pytest.raises(PenstockError) as caught:
            client.exists(["penstock/x"])
    client.close()
    assert_hidden("".join(traceback.format_exception(caught.value, limit=0)))
    assert_hidden(caplog.text)


@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [v], lambda v: {"url": v}, str.encode])
def test_what_is_cut_short_does_not_hide_that_it_was_a_url(wrap: Callable[[str], object]) -> None:
    """Managed servers have long passwords: the "@" behind one may fall into the gap."""
    mistyped = f"redis:/default:{SECRET * 30}@{'h' * 60}:6379/0"
    assert_hidden(shown_value(wrap(mistyped)))
    assert shown_value(wrap("x" * 200)) != HIDDEN


@pytest.mark.parametrize(
    "variables",
    [
        {"AWS_ENDPOINT_URL": f"http://user:{SECRET}@127.0.0.1:9"},
        {"AWS_ENDPOINT_URL": f"http://127.0.0.1:9?sig={SECRET}"},
        {"AWS_ENDPOINT_URL": f"http://u:{SECRET}:{SECRET}@{SECRET}@127.0.0.1:x"},
        {"AWS_SECRET_ACCESS_KEY": SECRET, "AWS_SESSION_TOKEN": SECRET},
    ],
    ids=lambda variables: " ".join(variables),
)
def test_nor_does_what_the_environment_tells_an_object_store(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PenstockError) as caught:
        open_client("s3://bucket?region=x", timeout_seconds=5).exists(["a"])
    assert_hidden(str(caught.value))


def test_a_url_in_a_url_is_judged_as_one() -> None:
    assert_hidden(without_password("s3://b?endpoint=http://u:QZ"))  # its "@host" was forgotten
    shown = "s3://b?endpoint=http://127.0.0.1:9000/x&region=eu"
    assert without_password(shown) == shown
