"""Checks that SGLang can use Penstock with this Python. They leave nothing behind."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import metadata

from penstock.commands.vllm_checks import IMPORT_SECONDS, Check, Status, run_python
from penstock.connectors.sglang.settings import MODULE, STORAGE
from penstock.connectors.sglang.support import TESTED, check_version
from penstock.errors import ConfigError

IMPORT_STORAGE = f"from {MODULE} import {STORAGE}"


def check_sglang(*, allow_untested: bool) -> Check:
    """Check that the tested version is installed; or, with `allow_untested`, any version."""
    name, version = "SGLang", None
    with suppress(metadata.PackageNotFoundError):
        version = metadata.version("sglang")
    if version is None:
        message = (
            f"SGLang is not installed for {sys.executable}; run `{sys.executable} -m pip install "
            f"sglang=={TESTED}`, or install Penstock in SGLang's environment and run this command "
            "there."
        )
        return Check(name, Status.FAILED, message)
    try:
        check_version(version)
    except ConfigError as error:
        if not allow_untested:
            return Check(name, Status.FAILED, str(error))
        message = (
            f"sglang {version} has not been tested with Penstock (tested: {TESTED}), but "
            "allow_untested_sglang is set; verify its outputs, or install the tested version."
        )
        return Check(name, Status.WARNING, message)
    return Check(name, Status.OK, f"sglang {version} (tested: {TESTED})")


def check_storage() -> Check:
    """Import the storage in a new process, because SGLang prints to stdout and may hang."""
    name = "storage"
    problem = run_python("-c", IMPORT_STORAGE, seconds=IMPORT_SECONDS)
    if problem is None:
        return Check(name, Status.OK, f"{STORAGE} can be imported")
    message = (
        f"{STORAGE} cannot be imported: {problem}; to see the full error, run "
        f"`{sys.executable} -P -c '{IMPORT_STORAGE}'`."
    )
    return Check(name, Status.FAILED, message)
