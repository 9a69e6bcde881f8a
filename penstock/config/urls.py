"""How URLs are shown in errors and logs: the location, without anything that could be a secret.

Passwords turn up in unexpected places: with a "?" or "/" that was not percent-encoded, before a
missing "@", in an unknown option. So this module does not search for secrets to hide. It shows only
the parts that are known to be harmless, and hides everything else.
"""

from __future__ import annotations

import re
import reprlib
from typing import NamedTuple
from urllib.parse import urlsplit

from penstock.errors import ConfigError

HIDDEN = "…"

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,31}")
_KNOWN_SCHEME = re.compile(
    r"(?:redis|valkey)s?(?:\+(?:sentinel|cluster))?|unix|s3|gs|az|file|mooncake|memory|https?",
    re.IGNORECASE,
)
_HOST = r"(?:[\w.-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{0,5})?"
_HOSTS = re.compile(rf"(?:{_HOST}(?:,{_HOST})*)?")
_PATH = re.compile(r"[^:=&;]*")
_VALUE = re.compile(r"[\w.:/,+~-]*")
# Options whose values are never secrets. The value of any other option is hidden.
_SHOWN_OPTIONS = frozenset(
    {
        *("db", "ssl_ca_certs", "ssl_ca_path", "ssl_cert_reqs", "ssl_certfile"),
        *("endpoint", "region", "anonymous"),
        *("segment", "host", "protocol", "devices", "metadata", "metrics"),
        "gb_per_second",
    }
)


class _Parts(NamedTuple):
    scheme: str
    has_login: bool
    hosts: str
    path: str
    query: str


def without_password(url: str) -> str:
    """Return a URL that is safe to show: the scheme, and the location if it can be parsed."""
    scheme, separator, _ = url.partition("://")
    parts = _split(url)
    # The text before "://" may be part of a password that contains "://".
    is_known = separator and _KNOWN_SCHEME.fullmatch(scheme)
    if not is_known and (parts is None or parts.has_login):
        return HIDDEN
    if parts is None:
        return f"{scheme}://{HIDDEN}"
    login = f"{HIDDEN}@" if parts.has_login else ""
    path = parts.path if _PATH.fullmatch(parts.path) else f"/{HIDDEN}"
    query = "&".join(_shown(option) for option in parts.query.split("&"))
    return f"{scheme}://{login}{parts.hosts}{path}{'?' if query else ''}{query}"


def may_hold_secret(url: str) -> bool:
    """Return whether `without_password` would hide a part of this URL."""
    return HIDDEN in without_password(url)


def check_url(url: str, name: str = "remote.url") -> None:
    """Raise ConfigError if the URL is ambiguous, so that parsers would disagree about it."""
    if _split(url) is None:
        raise ConfigError(
            f"{name} is {without_password(url)!r}, which is not a valid URL: expected "
            "scheme://user:password@host:port/path?option=value. Special characters in the user "
            "name or password must be percent-encoded: %2F for /, %3F for ?, %23 for #, %40 for @."
        )


def shown_value(value: object) -> str:
    """Return a value for use in an error: shortened, and without passwords in URLs."""
    if isinstance(value, bool):
        return str(value).lower()
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    if isinstance(value, str) and "://" in value:
        return short.repr(without_password(value))
    # A value with an "@" may be a mistyped URL. Check the whole value, because shortening it might
    # remove the "@" and keep the password before it.
    whole = repr(value)
    return HIDDEN if "://" in whole or "@" in whole else short.repr(value)


def shown_option(name: str) -> str:
    """Return an option's name, hidden if it is long or unusual: it may be a misplaced secret."""
    return name if re.fullmatch(r"[a-z_]{1,32}", name) else HIDDEN


def _split(url: str) -> _Parts | None:
    """Split a URL. Returns None if login, host and path cannot be told apart."""
    scheme, separator, rest = url.partition("://")
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    after = rest[len(authority) :]
    # A later "@", or a "#", is probably part of a password that was not percent-encoded.
    if not separator or not _SCHEME.fullmatch(scheme) or "@" in after or "#" in after:
        return None
    _, at, hosts = authority.rpartition("@")
    try:
        urlsplit(url)
    except ValueError:  # brackets without an IPv6 address in them
        return None
    if not _HOSTS.fullmatch(hosts):
        return None
    path, _, query = after.partition("?")
    return _Parts(scheme, bool(at), hosts, path, query)


def _shown(option: str) -> str:
    name, equals, value = option.partition("=")
    is_plain = name in _SHOWN_OPTIONS and _VALUE.fullmatch(value)
    if not option or (is_plain and ("://" not in value or without_password(value) == value)):
        return option
    return f"{shown_option(name)}={HIDDEN}" if equals else HIDDEN
