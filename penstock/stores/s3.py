"""S3 and compatible stores, Google's and Azure's object stores, or a shared folder.

    s3://bucket/prefix?region=us-east-1
    s3://bucket/prefix?endpoint=http://127.0.0.1:8333    MinIO, Ceph, SeaweedFS, ...
    gs://bucket/prefix
    az://container/prefix
    file:///folder                                       must exist and be mounted

Credentials are never in the URL: obstore finds them in the environment (AWS_ACCESS_KEY_ID,
GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME, ...) or asks the cloud it runs in;
`anonymous=true` sends unsigned requests. AWS_ENDPOINT_URL and similar variables are used if the URL
has no endpoint. Grant s3:ListBucket: without it AWS answers "forbidden" for missing objects.

Requests run in threads, not on an event loop, so that obstore's own threads do not wait for Python.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, LocalStore, S3Store

from penstock.config.urls import HIDDEN, shown_option
from penstock.errors import ConfigError, Corrupt, Full, Missing, StoreError
from penstock.stores.base import Answers
from penstock.stores.packs import PackStretch
from penstock.stores.remote import Client, Item, Listed, absent, wrong_size

SCHEMES = ("s3", "gs", "az", "file")

_VALUES_AT_ONCE = 16
_HEADS_AT_ONCE = 64
_NAMES_AT_ONCE = 1000
_CLOUDS: dict[str, Any] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}

# Options of a URL, and their names in obstore, whose `endpoint` for S3 the environment overrides.
_OPTIONS: dict[str, dict[str, str]] = {
    "s3": {"endpoint": "aws_endpoint_url_s3", "region": "region", "anonymous": "skip_signature"},
    "gs": {"anonymous": "skip_signature"},
    "az": {"endpoint": "endpoint", "anonymous": "skip_signature"},
    "file": {},
}
_SHAPES = {
    "endpoint": (r"https?://[^\s/?#@]+(/[^\s?#]*)?", "http://127.0.0.1:9000"),
    "region": (r"[\w-]+", "us-east-1"),
    "anonymous": (r"true|false", "true"),
}
_ENDPOINT_VARIABLE = re.compile(r"AWS_ENDPOINT(_URL(_S3)?)?|AZURE_(STORAGE_)?ENDPOINT")
_EXPECTED = "expected s3://bucket/prefix, gs://bucket, az://container or file:///existing/folder"
_FULL = re.compile("507 Insufficient Storage|QuotaExceeded|StorageFull|No space left|Disk quota")
_NO_RANGE = re.compile("416 Range Not Satisfiable|InvalidRange|[Rr]ange.*(larger|invalid|past)")
_NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound|bucket does not exist")

_Thing = TypeVar("_Thing")
_Result = TypeVar("_Result")


class ObjectClient(Client):
    def __init__(self, url: str, *, timeout_seconds: float) -> None:
        """Does not connect yet. Raises ConfigError if the URL is invalid."""
        self._timeout_seconds = timeout_seconds
        self._store = _opened(url, timeout_seconds)
        self._values = ThreadPoolExecutor(_VALUES_AT_ONCE, "penstock-values")
        self._heads = ThreadPoolExecutor(_HEADS_AT_ONCE, "penstock-heads")

    def put(self, items: Sequence[Item], ttl_seconds: float | None) -> Answers:
        # Object stores expire values by rules of the bucket. The head has the expiry time.
        return self.put_packs([[item] for item in items])

    def get(self, items: Sequence[Item]) -> Answers:
        with _Gate() as gate:
            return self._each(self._values, lambda item: self._get(item, gate), items)

    def exists(self, names: Sequence[str]) -> list[bool]:
        # LIST returns 1000 names at a time, but names are hashes: it would have to list all values
        # of the fleet, and is cheaper only if there are few more than the names asked for.
        found = self._each(self._heads, partial(obstore.head, self._store), names)
        return [not isinstance(one, Missing) and bool(_or_raise(one)) for one in found]

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        found = self._each(self._heads, partial(obstore.head, self._store), names)
        return [None if isinstance(one, Missing) else int(_or_raise(one)["size"]) for one in found]

    def put_packs(self, packs: Sequence[Sequence[Item]]) -> Answers:
        with _Gate() as gate:
            return self._each(self._values, lambda pack: self._put(pack, gate), packs)

    def get_stretches(self, stretches: Sequence[PackStretch]) -> Answers:
        with _Gate() as gate:
            return self._each(self._values, lambda some: self._get_stretch(some, gate), stretches)

    def remove(self, names: Sequence[str]) -> None:
        # Except on S3, a bulk request stops at the first missing name.
        batches = [names] if isinstance(self._store, S3Store) else names
        delete = partial(obstore.delete, self._store)
        for outcome in self._each(self._heads, delete, batches if names else []):
            if not isinstance(outcome, Missing):
                _or_raise(outcome)

    def find(self, prefix: str) -> Iterator[list[Listed]]:
        pages = [_pages(self._store, prefix)]
        while page := _or_raise(self._each(self._heads, lambda rest: next(rest, None), pages)[0]):
            yield page

    def close(self) -> None:
        for pool in (self._values, self._heads):
            pool.shutdown(wait=False, cancel_futures=True)

    def _put(self, pack: Sequence[Item], gate: _Gate) -> None:
        with gate.passed():
            value = b"".join(part for item in pack for part in (item.head, item.body))
        obstore.put(self._store, pack[-1].name, value, use_multipart=False)

    def _get_stretch(self, stretch: PackStretch, gate: _Gate) -> None:
        length = stretch.num_bytes
        value = memoryview(
            obstore.get_range(self._store, stretch.name, start=stretch.start, length=length)
        )
        if len(value) != length:
            raise Corrupt(f"a remote value ends after {len(value)} of {length} bytes")
        with gate.passed():
            for item in stretch.items:
                body = len(item.head)
                item.head[:], item.body[:] = value[:body], value[body : item.num_bytes]
                value = value[item.num_bytes :]

    def _get(self, item: Item, gate: _Gate) -> None:
        found = obstore.get(self._store, item.name)
        size = found.meta["size"]  # known before the body is read
        if size != item.num_bytes:
            raise wrong_size(size, item.num_bytes)
        value = memoryview(found.bytes())
        with gate.passed():
            item.head[:], item.body[:] = value[: len(item.head)], value[len(item.head) :]

    def _each(
        self, pool: ThreadPoolExecutor, run: Callable[[_Thing], _Result], things: Sequence[_Thing]
    ) -> list[_Result | StoreError]:
        """Run a batch in parallel. Returns a result or an error for each."""
        deadline = time.monotonic() + self._timeout_seconds
        outcomes: list[_Result | StoreError] = []
        try:
            futures = [pool.submit(run, thing) for thing in things]
        except RuntimeError as error:  # closed, or no more threads can be started
            return [StoreError(f"a request cannot be started: {error}")] * len(things)
        for future in futures:
            try:
                fault = future.exception(max(0.0, deadline - time.monotonic()))
            except (TimeoutError, CancelledError):
                future.cancel()  # if it is queued; a running one has its own timeout
                outcomes.append(StoreError("the object store timed out, or was closed"))
            else:
                outcomes.append(future.result() if fault is None else _as_store_error(fault))
        return outcomes


class _Gate:
    """Keeps late threads from the caller's memory, which is reused once the caller has returned."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_shut = False

    def __enter__(self) -> _Gate:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._is_shut = True

    @contextmanager
    def passed(self) -> Iterator[None]:
        with self._lock:
            if self._is_shut:
                raise StoreError("the batch has timed out")
            yield


def _pages(store: Any, prefix: str) -> Iterator[list[Listed]]:
    # obstore's prefixes are whole segments of a path; ours may end within one.
    for page in obstore.list(store, prefix.rpartition("/")[0] or None, chunk_size=_NAMES_AT_ONCE):
        if named := [m for m in page if m["path"].startswith(prefix)]:
            yield [Listed(m["path"], m["size"]) for m in named]


def _or_raise(outcome: _Result | StoreError) -> _Result:
    if isinstance(outcome, StoreError):
        raise outcome
    return outcome


def _as_store_error(error: BaseException) -> StoreError:
    if isinstance(error, StoreError):
        return error
    text = str(error)
    if isinstance(error, FileNotFoundError) and not _NO_BUCKET.search(text):
        return absent()
    if _NO_RANGE.search(text):
        return Corrupt("a remote value is too short")
    kind = Full if _FULL.search(text) else StoreError
    return kind(f"{type(error).__name__}: {_first_line(text)}"[:300])


def _first_line(text: str) -> str:
    """The first line, without queries (they may contain signatures) and logins."""
    line = re.sub(r"\?\S*", "", text.partition("\n")[0])
    return re.sub(r"://\S*@", f"://{HIDDEN}@", line)


# URLs.


def _opened(url: str, timeout_seconds: float) -> Any:
    parts, options = _parts(url)
    try:
        if parts.scheme == "file":
            return LocalStore(unquote(parts.path))
        config = _config(parts, options, timedelta(seconds=timeout_seconds))
        return _CLOUDS[parts.scheme](parts.netloc, **config)
    except (BaseError, ValueError) as error:
        words = _first_line(str(error))
        raise ConfigError(f"the remote URL cannot be opened ({words}): {_EXPECTED}") from None


def _config(parts: SplitResult, options: dict[str, str], timeout: timedelta) -> dict[str, Any]:
    endpoints = [value for name, value in os.environ.items() if _ENDPOINT_VARIABLE.fullmatch(name)]
    endpoints.append(options.get("endpoint", ""))
    client: dict[str, Any] = {"timeout": timeout, "connect_timeout": timeout}
    if any(endpoint.startswith("http://") for endpoint in endpoints):
        client["allow_http"] = True
    backoff = dict.fromkeys(("init_backoff", "max_backoff"), timedelta(milliseconds=50))
    config: dict[str, Any] = {
        "prefix": unquote(parts.path).strip("/") or None,
        "client_options": client,
        # One retry, for a pooled connection that was already dead.
        "retry_config": {"max_retries": 1, "retry_timeout": timeout, "backoff": backoff},
    }
    if parts.scheme == "s3" and "AWS_UNSIGNED_PAYLOAD" not in os.environ:
        config["unsigned_payload"] = True  # the head has a checksum; SHA-256 is slow
    return config | {_OPTIONS[parts.scheme][name]: value for name, value in options.items()}


def _parts(url: str) -> tuple[SplitResult, dict[str, str]]:
    try:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True))
    except ValueError:  # its message may contain a secret
        raise ConfigError(
            f"the remote URL cannot be read: {_EXPECTED}, with options such as ?region=us-east-1"
        ) from None
    named: object = re.fullmatch(r"[\w$][\w.-]*", parts.netloc, re.ASCII)
    if parts.scheme == "file":
        named = not parts.netloc and parts.path.strip("/")
    if parts.scheme not in SCHEMES or parts.fragment or not named:
        raise ConfigError(
            f"the remote URL has no valid bucket or folder: {_EXPECTED}; "
            "host and port belong in endpoint=, credentials in the environment"
        )
    known = _OPTIONS[parts.scheme]
    for name, value in options.items():
        if name not in known:
            raise ConfigError(
                f"the remote URL has an unknown option {shown_option(name)!r}: expected "
                f"{', '.join(known) or 'none'}; credentials belong in the environment"
            )
        shape, example = _SHAPES[name]
        if not re.fullmatch(shape, value):
            raise ConfigError(f"the remote URL's option {name} is invalid: expected e.g. {example}")
    return parts, options
