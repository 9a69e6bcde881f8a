"""URLs as they may be shown: where something is, and nothing that could be a secret.

A password is most often wrong where it is least expected: with a "?" or a "/" that was not
percent-encoded, in front of a missing "@", under an option nobody thought of. So this room does not
look for secrets in order to hide them. It shows what is known to be none, and hides the rest.
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
# Options whose values are no secrets; all others may be.
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
    """As it may be shown: the scheme and, where nothing in it can be misread, where that is."""
    scheme, separator, _ = url.partition("://")
    parts = _split(url)
    # What stands before "://" may be the beginning of a password with that in it.
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
    """Whether something of it would not be shown."""
    return HIDDEN in without_password(url)


def check_url(url: str, name: str = "remote.url") -> None:
    """Raise ConfigError for a URL that different readers would take apart differently."""
    if _split(url) is None:
        raise ConfigError(
            f"{name} is {without_password(url)!r}: it cannot be read as a URL; expected "
            "scheme://user:password@host:port/path?option=value. In a user or password write "
            "what is neither letter nor digit percent-encoded: %2F for /, %3F for ?, %23 for #, "
            "%40 for @."
        )


def shown_value(value: object) -> str:
    """A value that somebody gave, cut short, for an error to quote; URLs without passwords."""
    if isinstance(value, bool):
        return str(value).lower()
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    if isinstance(value, str) and "://" in value:
        return short.repr(without_password(value))
    # What is no URL and has an "@" may have been meant as one. Asked of the whole: in a long value
    # just that may be cut out, and the password before it not.
    whole = repr(value)
    return HIDDEN if "://" in whole or "@" in whole else short.repr(value)


def shown_option(name: str) -> str:
    """An option's name. A long or unusual one may be a secret, pasted in the wrong place."""
    return name if re.fullmatch(r"[a-z_]{1,32}", name) else HIDDEN


def _split(url: str) -> _Parts | None:
    """None where it is not clear what is login, what host and what path."""
    scheme, separator, rest = url.partition("://")
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    after = rest[len(authority) :]
    # An "@" further on, or a "#", is most likely part of a password that was not encoded.
    if not separator or not _SCHEME.fullmatch(scheme) or "@" in after or "#" in after:
        return None
    _, at, hosts = authority.rpartition("@")
    try:
        urlsplit(url)
    except ValueError:  # brackets of an IPv6 address where there is none
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
