"""Start the servers of the remote benchmarks; each is a context manager that yields a URL."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from servers.mooncake_master import MooncakeMaster
from servers.redis_server import RedisServer
from servers.s3_server import ACCESS_KEY, SECRET_KEY, S3Server

# A peer that provides memory until its standard input is closed.
_LENDER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 2 << 30, 16 << 20, "tcp", "", sys.argv[1]) == 0
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    server = RedisServer(folder / "redis")
    try:
        yield server.url
    finally:
        server.kill()


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    os.environ |= {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    server = S3Server(folder / "s3", volume_mib=512)
    try:
        yield server.url()
    finally:
        server.kill()


@contextmanager
def mooncake_master(folder: Path) -> Iterator[str]:
    master = MooncakeMaster(folder / "mooncake")
    lender = subprocess.Popen(
        [sys.executable, "-c", _LENDER, f"127.0.0.1:{master.port}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert lender.stdout is not None
        while b"ready" not in lender.stdout.readline():
            assert lender.poll() is None, "the peer that provides memory did not start"
        yield master.url()
    finally:
        lender.kill()
        master.kill()


def raw_mooncake_store(url: str) -> Any:
    from mooncake.store import MooncakeDistributedStore

    parts = urlsplit(url)
    host = parse_qs(parts.query).get("host", ["127.0.0.1"])[0]
    store = MooncakeDistributedStore()
    arguments = (host, "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", f"{parts.hostname}:{parts.port}")
    assert store.setup(*arguments) == 0
    return store
