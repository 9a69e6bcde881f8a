"""The real SmolLM2 in a process of its own, and a tiny model inside this one."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server.running import Client, Local, Spawned, make_tiny


@pytest.fixture(scope="session")
def tiny(cache: Path) -> Path:
    return make_tiny(cache)


@pytest.fixture
def local(tiny: Path) -> Iterator[Callable[..., Local]]:
    """Makes servers of the tiny model; each is stopped at the end."""
    made: list[Local] = []

    def make(*args: Any, wait: bool = True, **options: Any) -> Local:
        made.append(Local(tiny, *args, **options))
        return made[-1].start(wait=wait)

    yield make
    for server in made:
        server.may_load.set()
        server.stop()


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[Local]:
    """One for all tests of a file that leave no trace."""
    made = Local(tiny).start()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def client(server: Local) -> Iterator[Client]:
    with server.client() as made:
        yield made


@pytest.fixture
def spawn(cache: Path) -> Iterator[Callable[..., Spawned]]:
    made: list[Spawned] = []

    def make(*arguments: object, **environment: str) -> Spawned:
        made.append(Spawned(cache, *arguments, **environment))
        return made[-1]

    yield make
    for spawned in made:
        spawned.end(signal.SIGKILL)
