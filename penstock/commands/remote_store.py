"""`penstock store` for a URL: look into a store that instances share, audit it, empty it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import typer

from penstock.commands import (
    Tick,
    new_table,
    print_fields,
    print_json,
    progress_bar,
    remote_audit,
    stdout_console,
)
from penstock.config import ENV_REMOTE_SECRET
from penstock.config.urls import without_password
from penstock.errors import ConfigError, StoreError
from penstock.stores.envelope import Envelope, HeadFacts
from penstock.stores.remote import Client
from penstock.stores.remotes import open_client
from penstock.types import BlockSpec
from penstock.units import format_bytes

# Of one batch. More than a server grants: nobody waits for this one, and lines may be slow.
_TIMEOUT_SECONDS = 15.0
_MAX_SHOWN = 50
_PREFIX_DIGITS = 8
_KEY_DIGITS = 16


def list_remote(url: str, *, names: bool, as_json: bool) -> None:
    shown = without_password(url)
    groups: dict[str | None, remote_audit.Values] = {}
    samples: dict[str, HeadFacts | None] = {}
    with _opened(url) as client, progress_bar() as tick:
        values = remote_audit.list_values(client, remote_audit.PREFIX, _counting(tick))
        for name, num_bytes in values.items():
            groups.setdefault(remote_audit.namespace_prefix(name), {})[name] = num_bytes
        others = groups.pop(None, {})
        own = {prefix: group for prefix, group in sorted(groups.items()) if prefix is not None}
        for index, (prefix, group) in enumerate(own.items()):
            tick("reading a head of each namespace", index / len(own))
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
        if names:
            facts["values"] = [
                {"name": name, "num_bytes": num_bytes} for name, num_bytes in sorted(values.items())
            ]
        print_json(facts)
        return
    rows = [("namespaces", f"{len(own):,}"), ("values", _count(values))]
    if others:
        rows.append(("not Penstock's", f"{_count(others)}, by their names"))
    print_fields(shown, rows)
    for prefix, group in own.items():
        print_fields(f"\n{prefix}", [("values", _count(group)), *_rows(samples[prefix])])
    if own:
        typer.echo("\nWritten and expires are of one value of each namespace.")
    if names:
        # Plain lines, not a table: there may be millions.
        typer.echo(f"\n{'bytes':>12}  name")
        for name, num_bytes in sorted(values.items()):
            typer.echo(f"{num_bytes:>12}  {name}")


def check_remote(url: str, *, repair: bool, as_json: bool) -> None:
    shown = without_password(url)
    secret = os.environ.get(ENV_REMOTE_SECRET, "").strip().encode()
    Envelope(BlockSpec(bytes(32), 1, 1), secret=secret)  # refuses a bad one before all is read
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


def clear_remote(url: str, *, namespace: str | None, yes: bool, as_json: bool) -> None:
    if as_json and not yes:
        raise ConfigError("--json leaves no place for a question: expected --yes with it")
    if namespace is not None and not re.fullmatch("[0-9a-f]{32}", namespace):
        raise ConfigError(
            f"--namespace is {namespace[:80]!r}: expected 32 hexadecimal digits as "
            "`penstock store ls` shows them; copy them from there"
        )
    shown = without_password(url)
    prefix = remote_audit.PREFIX + (f"{namespace}/" if namespace is not None else "")
    with _opened(url) as client:
        with progress_bar() as tick:
            values = remote_audit.list_values(client, prefix, _counting(tick))
        question = f"Delete all {_count(values)}, under {prefix} in {shown}?"
        if values and not yes and not typer.confirm(question, err=True):
            raise typer.Abort
        with progress_bar() as tick:
            # What was asked about, not what has come meanwhile.
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
        typer.echo(f"{_count(values)}, were deleted under {prefix} in {shown}.")
    else:
        typer.echo(f"{shown} holds nothing under {prefix}.")


@contextmanager
def _opened(url: str) -> Iterator[Client]:
    # Whoever only looks lends no memory: what others put there would go with this process.
    lending = re.compile(r"(?<=[?&])segment=[^&]*") if url.lower().startswith("mooncake:") else None
    client = open_client(lending.sub("segment=0", url) if lending else url, _TIMEOUT_SECONDS)
    try:
        yield client
    except StoreError as error:
        raise StoreError(
            f"{without_password(url)} failed ({error}): expected a store that answers and may be "
            "listed; start it, correct the URL, or grant what it denies"
        ) from None
    finally:
        client.close()


def _draw(
    shown: str, found: remote_audit.RemoteAudit, num_values: int, num_removed: int, repair: bool
) -> None:
    damages = found.damages
    title = "damage was found" if damages else "sound"
    if 0 < num_values == found.num_foreign:
        title = "nothing in it is of this secret"
    rows = [("ok", found.num_ok, ""), ("corrupt", len(damages), "")]
    for name, number, words in (
        ("encrypted", found.num_encrypted, "their heads are sound; only tenants can tell more"),
        ("expired", found.num_expired, "sound, and not used any more"),
        ("foreign", found.num_foreign, f"not verified: not of the secret in {ENV_REMOTE_SECRET}"),
        ("changed meanwhile", found.num_changed, ""),
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
    table = new_table("namespace", "key", "problem")
    table.columns[1].justify = table.columns[2].justify = "left"
    for damage in damages[:_MAX_SHOWN]:
        prefix, _, key = damage.name.removeprefix(remote_audit.PREFIX).partition("/")
        table.add_row(f"{prefix[:_PREFIX_DIGITS]}…", f"{key[:_KEY_DIGITS]}…", damage.problem)
    stdout_console().print(table)
    if len(damages) > _MAX_SHOWN:
        typer.echo(f"and {len(damages) - _MAX_SHOWN:,} more; --json lists all")
    if not repair:
        typer.echo("Remove them with the same command and --repair.")


def _rows(sample: HeadFacts | None) -> list[tuple[str, str]]:
    if sample is None:
        return [("block", "no head could be read; see penstock store check")]
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
    """None for what is no time: nobody has judged the head it is from."""
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(" ")
    except (ValueError, OverflowError, OSError):
        return None


def _count(values: remote_audit.Values) -> str:
    plural = "" if len(values) == 1 else "s"
    return f"{len(values):,} value{plural}, {format_bytes(sum(values.values()))}"


def _counting(tick: Tick) -> Callable[[int], None]:
    return lambda num_values: tick(f"listing, {num_values:,} values so far", 0.0)
