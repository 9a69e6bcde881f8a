"""The directions in which the house may import, read from the code itself."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent / "penstock"

# Floors from the ground up: a module imports from its own floor's rooms it is allowed to, or below.
BASE = {
    "errors",
    "types",
    "units",
    "keys",
    "clock",
    "events",
    "config",
    "machine",
    "hints",
    "urls",
    "install",
}
BOOKS = {
    "ledger",
    "policies",
    "books",
    "write_down",
    "tiers",
    "loads",
    "saves",
    "looks",
    "pins",
    "retention",
    "demotions",
    "prefetches",
    "sessions",
    "write_gate",
    "tickets",
    "flights",
    "health",
    "costs",
    "damages",
    "choosing",
    "meters",
    "meeting",
}
STORES = {"stores", "codecs"}
FLOORS = [
    BASE,
    BOOKS | STORES,
    {"transfer", "metrics"},
    {"offload", "build", "preflight"},
    {"engine", "connectors", "sim", "plan", "watch"},
    {"server", "commands"},
    {"cli", "__main__", "__init__"},
]
# Heavy or optional libraries, and the only places that may import them at all.
ALLOWED = {
    "torch": {
        "stores/device",
        "transfer/cuda",
        "transfer/cuda_copier",
        "transfer/cuda_stage",
        "transfer/pinning",
        "engine",
        "connectors/vllm/device",
    },
    "numpy": {"plan/links", "engine", "transfer/cuda", "transfer/cuda_copier"},
    "triton": {"transfer/cuda_stage", "engine"},
    "transformers": {"engine"},
    "numba": {"engine"},
    "vllm": {"connectors/vllm"},
    "redis": {"stores/redis", "stores/redis_urls"},
    "obstore": {"stores/s3"},
    "mooncake": {"stores/mooncake_library"},
    "cryptography": {"stores/envelope"},
    "prometheus_client": {"metrics", "server"},
    "fastapi": {"server"},
    "starlette": {"server"},
    "pydantic": {"server"},
    "pydantic_core": {"server"},
    "uvicorn": {"server"},
    "opentelemetry": {"server/spans", "server/tracing"},
    "typer": {"cli", "commands"},
    "rich": {"cli", "commands"},
}


def _modules() -> dict[str, set[str]]:
    """Each module's dotted path below penstock, with every absolute name it imports."""
    found = {}
    for path in ROOT.rglob("*.py"):
        name = str(path.relative_to(ROOT).with_suffix(""))
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name}: relative imports hide the direction"
                module = node.module or ""
                names.add(module)
                names.update(f"{module}.{alias.name}" for alias in node.names)
        found[name] = names
    return found


def _floor(room: str) -> int:
    for number, rooms in enumerate(FLOORS):
        if room in rooms:
            return number
    raise AssertionError(f"penstock/{room} has no floor: place it in {__file__}")


def _rooms_imported(names: set[str]) -> set[str]:
    return {n.split(".")[1] for n in names if n.startswith("penstock.")} - {"__version__"}


def test_imports_run_one_way() -> None:
    for module, names in _modules().items():
        room = module.split("/")[0]
        for other in _rooms_imported(names):
            assert _floor(other) <= _floor(room), f"penstock/{module} reaches up to {other}"


def test_books_and_stores_never_import_each_other() -> None:
    for module, names in _modules().items():
        room = module.split("/")[0]
        others = _rooms_imported(names)
        if room in BOOKS:
            assert not others & STORES, f"the book {module} imports a store"
        if room in STORES:
            assert not others & BOOKS, f"the store {module} imports a book"


def test_books_know_no_io_threads_or_clock() -> None:
    worldly = {"os", "io", "time", "threading", "socket", "subprocess", "pathlib", "asyncio"}
    for module, names in _modules().items():
        if module.split("/")[0] in BOOKS:
            assert not {n.split(".")[0] for n in names} & worldly, f"{module} is not pure"


def test_heavy_libraries_stay_in_their_rooms() -> None:
    for module, names in _modules().items():
        for library, rooms in ALLOWED.items():
            if any(n.split(".")[0] == library for n in names):
                at_home = any(module == room or module.startswith(f"{room}/") for room in rooms)
                assert at_home, f"penstock/{module} imports {library}"
