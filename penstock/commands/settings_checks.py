"""Checks that vLLM can start with these settings here. They leave nothing behind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from penstock.commands.vllm_checks import Check, Status
from penstock.config import Config, DiskConfig, RemoteConfig, as_typed
from penstock.config.options import OPTIONS
from penstock.config.urls import shown_value, without_password
from penstock.connectors.settings import TierSettings
from penstock.connectors.vllm.settings import CONNECTOR, MODULE, POLICY, VllmSettings
from penstock.errors import ConfigError, Foreign, Locked, PenstockError
from penstock.machine import check_machine
from penstock.units import format_bytes

_HALF_ROLES = {"kv_producer": "saves and never loads", "kv_consumer": "loads and never saves"}
_MAX_SHOWN = 80


class Examined(NamedTuple):
    checks: list[Check]
    settings: VllmSettings | None  # None if a check found them invalid


def examine_options(read: Callable[[], VllmSettings]) -> Examined:
    try:
        return Examined([], read())
    except PenstockError as error:
        return Examined([Check("settings", Status.FAILED, str(error))], None)


def examine_transfer_config(text: str) -> Examined:
    """Check each field of `--kv-transfer-config` that concerns Penstock."""
    name, advice = "--kv-transfer-config", "run `penstock vllm-config` to get one."
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        message = f"it is not valid JSON ({error}): expected an object; {advice}"
        return Examined([Check(name, Status.FAILED, message)], None)
    if not isinstance(fields, dict):
        message = f"it is {_show(fields)}: expected an object; {advice}"
        return Examined([Check(name, Status.FAILED, message)], None)
    checks = [
        _check_field(fields, "kv_connector", CONNECTOR),
        _check_field(fields, "kv_connector_module_path", MODULE),
        _check_role(fields),
        _check_policy(fields),
    ]
    name = "kv_connector_extra_config"
    extra = fields.get(name, {})
    try:
        if not isinstance(extra, dict):
            raise ConfigError(f"it is {_show(extra)}: expected an object of settings; correct it.")
        settings = VllmSettings.read(extra)
    except PenstockError as error:
        return Examined([*checks, Check(name, Status.FAILED, str(error))], None)
    found = ", ".join(extra) if extra else "defaults only"
    return Examined([*checks, Check(name, Status.OK, found)], settings)


def _check_field(
    fields: Mapping[str, Any], name: str, expected: str, otherwise: Status = Status.FAILED
) -> Check:
    if fields.get(name) == expected:
        return Check(name, Status.OK, expected)
    found = f"is {_show(fields[name])}" if name in fields else "is missing"
    return Check(name, otherwise, f'it {found}: expected "{expected}"; correct it.')


def _check_role(fields: Mapping[str, Any]) -> Check:
    for role, does in _HALF_ROLES.items():
        if fields.get("kv_role") == role:
            message = f'it is "{role}", which {does}; set it to "kv_both" to do both.'
            return Check("kv_role", Status.WARNING, message)
    return _check_field(fields, "kv_role", "kv_both")


def _check_policy(fields: Mapping[str, Any]) -> Check:
    check = _check_field(fields, "kv_load_failure_policy", POLICY, Status.WARNING)
    if check.status is Status.OK:
        return check
    # vLLM's default is to fail the request.
    return check._replace(
        message=f"{check.message} Otherwise a request fails if one of its blocks cannot be loaded."
    )


def _show(value: object) -> str:
    text = json.dumps(value)
    if "://" in text or "@" in text:  # it may contain a password
        return shown_value(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def check_tiers(
    settings: TierSettings, names: Mapping[str, str] = OPTIONS
) -> tuple[Check, Config | None]:
    """Check the settings. Returns the check and, if they are valid, the settings of the tiers.

    `names` has the option names for errors.
    """
    try:
        tiers = settings.tiers(names)
    except PenstockError as error:
        return Check("settings", Status.FAILED, str(error)), None
    if tiers.node.url is not None:
        return Check("settings", Status.OK, f"the node at {tiers.node.url}"), tiers
    found = f"{format_bytes(tiers.host.size_bytes)} of DRAM"
    if tiers.disk.path is None:
        found += ", no disk"
    elif tiers.disk.read_only:
        found += f", {tiers.disk.path} (read-only)"
    else:
        found += f", {format_bytes(tiers.disk.size_bytes)} in {tiers.disk.path}"
    if tiers.remote.url is not None:
        found += f", shared store {without_password(tiers.remote.url)}"
    return Check("settings", Status.OK, found), tiers


def check_anywhere(tiers: Config, *, is_delegated: bool = True) -> Check | None:
    """Check for settings that fail on every machine. Returns None if there are none.

    `is_delegated` if other processes copy between their devices and DRAM, as vLLM's workers do.
    """
    from penstock.stores import preflight

    try:
        preflight.check_anywhere(tiers)
        if is_delegated:
            preflight.check_delegated(tiers)
    except PenstockError as error:
        return Check("settings", Status.FAILED, str(error))
    return None


def check_room(tiers: Config) -> Check:
    try:
        with as_typed(tiers):
            check_machine(tiers)
    except PenstockError as error:
        return Check("room", Status.FAILED, str(error))
    return Check("room", Status.OK, "this machine has enough memory and disk space")


def check_remote(remote: RemoteConfig) -> Check | None:
    """Check that the shared store responds. Returns None if none is configured."""
    if remote.url is None:
        return None
    from penstock.stores.remotes import open_client

    name = "remote store"
    try:
        client = open_client(remote.url, remote.timeout_seconds)
    except PenstockError as error:
        return Check(name, Status.FAILED, str(error))
    try:
        client.exists(["penstock/doctor"])
    except PenstockError as error:
        return Check(
            name,
            Status.FAILED,
            f"it does not respond: {error}; start it, or correct remote.url. Penstock would still "
            "start, and use it once it responds.",
        )
    finally:
        client.close()
    return Check(name, Status.OK, f"{without_password(remote.url)} responds")


def check_disk(disk: DiskConfig, *, has_room: bool) -> Check | None:
    """Check that a store can be opened in the folder. None if `check_room` covers it."""
    if disk.path is None:
        return None
    name, directory = "disk store", Path(disk.path)
    if has_room and not os.path.lexists(directory):
        return Check(name, Status.OK, f"{directory} does not exist yet, and will be created")
    if not directory.is_dir():
        return None
    try:
        return Check(name, Status.OK, _inspect(directory, disk))
    except PenstockError as error:
        return Check(name, Status.FAILED, str(error))
    except OSError as error:
        message = (
            f"{error.filename or directory}: {error.strerror}; expected a folder with free space, "
            "whose files this user may read and write; fix that, or choose another disk.path."
        )
        return Check(name, Status.FAILED, message)


def _inspect(directory: Path, disk: DiskConfig) -> str:
    """Describe the store. Raises PenstockError or OSError if vLLM could not start with it."""
    # Imported here because they need xxhash, which may be missing.
    from penstock.commands import disk_audit
    from penstock.stores import folder, slab
    from penstock.stores.directory import refuse_strangers_index
    from penstock.stores.preflight import check_access, try_writing

    shelves = folder.look_into(directory)
    if disk.read_only:
        readable = [shelf for shelf in shelves or () if disk_audit.find_problem(shelf) is None]
        if not readable:
            raise Foreign(f"{directory} does not contain a store to read; check the path.")
    else:
        if (writer := folder.find_writer(directory)) is not None:
            raise Locked(
                f"{directory} is being written by {writer}; unless that is the vLLM to check, "
                "stop it, choose another disk.path, or set disk.read_only."
            )
        for path in (directory, *(shelf.path for shelf in shelves or ())):
            check_access([path / "LOCK", path / "index"])
            check_access([found for _, found in slab.slab_paths(path)])
        try_writing(directory)
        if shelves is None:
            refuse_strangers_index(directory)
            return f"a store will be created in {directory}"
    if not shelves:
        return f"{directory} contains no KV yet"
    held = "; ".join(f"{s.title}, {format_bytes(s.disk_bytes)}" for s in shelves)
    return f"{directory} contains KV for {held}"
