"""Where spans are sent: the option of `penstock serve`, else OpenTelemetry's variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from penstock.errors import ConfigError

OPTION = "--otlp-traces-endpoint"
ENV_TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
ENV_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
ENV_DISABLED = "OTEL_SDK_DISABLED"
_ENV_EXPORTER = "OTEL_TRACES_EXPORTER"
_ENV_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"
_PATH = "/v1/traces"


@dataclass(frozen=True, slots=True)
class Collector:
    url: str  # spans are posted to it
    source: str  # the option or variable that named it


def find_collector(option: str | None, environment: Mapping[str, str]) -> Collector | None:
    """None if tracing is off. Raises ConfigError if the collector's URL is invalid."""
    if is_disabled(environment):
        return None
    if option is not None:
        return Collector(_checked(option, OPTION, _PATH), OPTION)
    exporters = environment.get(_ENV_EXPORTER, "").strip() or "otlp"
    if "otlp" not in (name.strip() for name in exporters.split(",")):
        return None
    # As OpenTelemetry specifies: the first is used unchanged, the path is appended to the second.
    for name, path in ((ENV_TRACES_ENDPOINT, ""), (ENV_ENDPOINT, _PATH)):
        url = environment.get(name, "").strip()
        if url:
            _check_protocol(environment)
            return Collector(_checked(url, name, path), name)
    return None


def is_disabled(environment: Mapping[str, str]) -> bool:
    return environment.get(ENV_DISABLED, "").strip().lower() == "true"


def _checked(url: str, source: str, path: str) -> str:
    expected = (
        "expected the URL of a collector that takes OTLP over HTTP, such as http://localhost:4318"
    )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ConfigError(f"{source} is not a URL: {expected}.") from None
    if parts.username is not None or parts.query or parts.fragment:
        # The URL is not quoted: it may contain a secret.
        raise ConfigError(
            f"{source} has a user, a query or a fragment in its URL: {expected}; put credentials "
            "in OTEL_EXPORTER_OTLP_HEADERS."
        )
    is_plain = url.isascii() and url.isprintable() and " " not in url
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or not is_plain:
        raise ConfigError(f"{source} is {url!r}: {expected}.")
    base = url.rstrip("/")
    return url if not path or base.endswith(path) else base + path


def _check_protocol(environment: Mapping[str, str]) -> None:
    for name in _ENV_PROTOCOLS:
        protocol = environment.get(name, "").strip()
        if protocol:
            if protocol != _PROTOCOL:
                raise ConfigError(
                    f"{name} is {protocol!r}: expected {_PROTOCOL}, the only protocol that this "
                    f"server supports; set {OPTION}, or turn tracing off with "
                    f"{ENV_DISABLED}=true."
                )
            return
