"""`penstock store` for a remote store: list, check and clear its values."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import typer

from penstock.commands import Tick, print_fields, print_json, progress_bar, remote_audit
from penstock.commands.damage_table import print_damages
from penstock.commands.remote_audit import RemoteAudit, Values
from penstock.config import ENV_REMOTE_SECRET
from penstock.config.urls import without_password
from penstock.errors import ConfigError, StoreError
from penstock.stores.envelope import Envelope, HeadFacts
from penstock.stores.remote import Client
from penstock.stores.remotes import open_client
from penstock.types import BlockSpec
from penstock.units import counted, format_bytes

# For one batch. Longer than a server allows: no request waits for it, and links may be slow.
_TIMEOUT_SECONDS = 15.0
_PREFIX_DIGITS = 8
_KEY_DIGITS = 16


def show(url: str, *, blocks: bool, as_json: bool) -> None:
    shown = without_password(url)
    groups: dict[str | None, Values] = {}
    samples: dict[str, HeadFacts | None] = {}
    with _opened(url) as client, progress_bar() as tick:
        values = remote_audit.list_values(client, remote_audit.PREFIX, _counting(tick))
        for name, num_bytes in values.items():
            groups.setdefault(remote_audit.namespace_prefix(name), {})[name] = num_bytes
        others = groups.pop(None, {})
        own = {prefix: group for prefix, group in sorted(groups.items()) if prefix is not None}
        for index, (prefix, group) in enumerate(own.items()):
            tick("reading one header per namespace", index / len(own))
            samples[prefix] = remote_audit.sample(client, group)
    if as_json:
        facts: dict[str, object] = {
            "url": shown,
            "num_values": len(values),
            "num_bytes": sum(values.values()),
            "num_others": len(others),
            "namespaces": [
                {
                    "prefix": prefix,
                    "num_values": len(group),
                    "num_bytes": sum(group.values()),
                    "sample": _plain(samples[prefix]),
                }
                for prefix, group in own.items()
            ],
        }
        if blocks:
            facts["values"] = [
                {"name": name, "num_bytes": num_bytes} for name, num_bytes in sorted(values.items())
            ]
        print_json(facts)
        return
    rows = [("namespaces", f"{len(own):,}"), ("values", _count(values))]
    if others:
        rows.append(("not Penstock's", f"{_count(others)}, judging by their names"))
    print_fields(shown, rows)
    for prefix, group in own.items():
        print_fields(f"\n{prefix}", [("values", _count(group)), *_rows(samples[prefix])])
    if own:
        typer.echo("\nWritten and expires are those of one sample value per namespace.")
    if blocks:
        # Plain lines, not a table: there may be millions of values.
        typer.echo(f"\n{'bytes':>12}  name")
        for name, num_bytes in sorted(values.items()):
            typer.echo(f"{num_bytes:>12}  {name}")


def check(url: str, *, repair: bool, as_json: bool) -> None:
    shown = without_password(url)
    secret = os.environ.get(ENV_REMOTE_SECRET, "").strip().encode()
    Envelope(BlockSpec(bytes(32), 1, 1), secret=secret)  # rejects a bad secret before reading
    with _opened(url) as client, progress_bar() as tick:
        values = remote_audit.list_values(client, remote_audit.PREFIX, _counting(tick))
        found = remote_audit.audit(client, values, secret, lambda share: tick("checking", share))
        damages = found.damages
        if repair:
            damaged = [damage.name for damage in damages]
            remote_audit.remove_values(client, damaged, lambda share: tick("removing", share))
    num_removed = len(damages) if repair else 0
    if as_json:
        print_json(
            {
                "url": shown,
                "sound": not damages,
                "num_values": len(values),
                "num_ok": found.num_ok,
                "num_corrupt": len(damages),
                "num_encrypted": found.num_encrypted,
                "num_expired": found.num_expired,
                "num_foreign": found.num_foreign,
                "num_changed": found.num_changed,
                "num_removed": num_removed,
                "damaged": [damage._asdict() for damage in damages],
            }
        )
    else:
        _draw(shown, found, len(values), num_removed, repair)
    if damages:
        raise typer.Exit(1)


def clear(url: str, *, namespace: str | None, yes: bool, as_json: bool) -> None:
    if namespace is not None and not re.fullmatch("[0-9a-f]{32}", namespace):
        raise ConfigError(
            f"--namespace is {namespace[:80]!r}: expected the 32 hexadecimal digits that "
            "`penstock store ls` shows"
        )
    shown = without_password(url)
    prefix = remote_audit.PREFIX + (f"{namespace}/" if namespace is not None else "")
    with _opened(url) as client:
        with progress_bar() as tick:
            values = remote_audit.list_values(client, prefix, _counting(tick))
        question = f"Delete {_count(values)}, under {prefix} in {shown}?"
        if values and not yes and not typer.confirm(question, err=True):
            raise typer.Abort
        with progress_bar() as tick:
            # Only what the question named, not values added since.
            remote_audit.remove_values(client, list(values), lambda share: tick("deleting", share))
    if as_json:
        print_json(
            {
                "url": shown,
                "prefix": prefix,
                "num_removed": len(values),
                "freed_bytes": sum(values.values()),
            }
        )
    elif values:
        typer.echo(f"Deleted {_count(values)}, under {prefix} in {shown}.")
    else:
        typer.echo(f"{shown} holds nothing under {prefix}: nothing to delete.")


@contextmanager
def _opened(url: str) -> Iterator[Client]:
    # Contribute no memory: values stored in it would be lost when this process ends.
    lending = re.compile(r"(?<=[?&])segment=[^&]*") if url.lower().startswith("mooncake:") else None
    client = open_client(lending.sub("segment=0", url) if lending else url, _TIMEOUT_SECONDS)
    try:
        yield client
    except StoreError as error:
        raise StoreError(
            f"{without_password(url)} failed ({error}): expected a store that answers and can be "
            "listed; start it, correct the URL, or grant the missing permission"
        ) from None
    finally:
        client.close()


def _draw(shown: str, found: RemoteAudit, num_values: int, num_removed: int, repair: bool) -> None:
    damages = found.damages
    title = "damage found" if damages else "sound"
    if 0 < num_values == found.num_foreign:
        title = "no value was written with this secret"
    rows = [("ok", found.num_ok, ""), ("corrupt", len(damages), "")]
    for name, number, words in (
        ("encrypted", found.num_encrypted, "headers are sound; the data needs the tenant's name"),
        ("expired", found.num_expired, "sound, but no longer used"),
        ("foreign", found.num_foreign, f"not verified: not written with {ENV_REMOTE_SECRET}"),
        ("changed during the check", found.num_changed, ""),
    ):
        if number:
            rows.append((name, number, words))
    if repair:
        rows.append(("removed", num_removed, ""))
    print_fields(
        f"{shown}: {title}",
        [(name, f"{number:,}{f' ({words})' if words else ''}") for name, number, words in rows],
    )
    if not damages:
        return
    damage_rows = []
    for damage in damages:
        prefix, _, key = damage.name.removeprefix(remote_audit.PREFIX).partition("/")
        damage_rows.append((f"{prefix[:_PREFIX_DIGITS]}…", f"{key[:_KEY_DIGITS]}…", damage.problem))
    print_damages(("namespace", "key", "problem"), damage_rows)
    if not repair:
        typer.echo("Remove the damaged values: run the same command with --repair.")


def _rows(sample: HeadFacts | None) -> list[tuple[str, str]]:
    if sample is None:
        return [("block", "no header could be read; run penstock store check")]
    return [
        ("block", format_bytes(sample.block_bytes)),
        ("encrypted", "yes" if sample.encrypted else "no"),
        ("written", _time(sample.written) or "?"),
        ("expires", "never" if sample.expires is None else _time(sample.expires) or "?"),
    ]


def _plain(sample: HeadFacts | None) -> dict[str, object] | None:
    if sample is None:
        return None
    return {
        "namespace": sample.namespace.hex(),
        "block_bytes": sample.block_bytes,
        "encrypted": sample.encrypted,
        "written": _time(sample.written),
        "expires": None if sample.expires is None else _time(sample.expires),
    }


def _time(seconds: int) -> str | None:
    """None if it is not a valid time: the header it comes from has not been verified."""
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(" ")
    except (ValueError, OverflowError, OSError):
        return None


def _count(values: Values) -> str:
    return f"{counted(len(values), 'value')}, {format_bytes(sum(values.values()))}"


def _counting(tick: Tick) -> Callable[[int], None]:
    return lambda num_values: tick(f"listing, {counted(num_values, 'value')} so far", 0.0)
