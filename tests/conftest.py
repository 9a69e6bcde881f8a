"""Stands here so that tests can import `tools`, and to close what a test leaves open."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from thorough import mark_long_tests
from tools import Rig

# Where there is no GPU its kernels run in Triton's interpreter. Triton must know before it is
# imported, and torch imports it.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# Test files share the cores: a thread of torch's that waits gives its core to another file's.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# With AVX2, MKL rounds by where an operand lies in memory, unless told not to.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

# The gate looks at the same examples every time; whoever works on the code looks at new ones.
# None has a deadline: a busy machine proves nothing.
settings.register_profile("gate", derandomize=True, deadline=None)
settings.register_profile("work", deadline=None)
settings.load_profile("gate" if os.environ.get("CI") else "work")


# Whoever starts tests in the background of a script has them ignore Ctrl-C, and with them all that
# they start; some tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Files run two at a time: the longest first, so that none of them is left alone at the end.
_LONGEST = (
    "test_demo.py",
    "test_needles.py",
    "test_soak.py",
    "test_record.py",
    "test_top.py",
    "test_docs_remote.py",
    "test_agreement.py",
    "test_readme.py",
)


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_long_tests(items)
    items.sort(key=lambda item: item.path.name not in _LONGEST)


@pytest.fixture
def rigs() -> Iterator[Callable[..., Rig]]:
    """Makes rigs; each is closed at the end, and must close cleanly."""
    made: list[Rig] = []

    def make(*args: Any, **kwargs: Any) -> Rig:
        made.append(Rig(*args, **kwargs))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where converted weights are kept during the tests, instead of at home.

    One for all processes that run tests: to unpack a model takes half a minute.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    folder.mkdir(exist_ok=True)
    return folder
