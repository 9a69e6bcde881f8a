"""The directions in which packages may import each other, read from the code itself."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent / "penstock"

# Floors from the ground up. A room imports from its own floor or from below, and no two rooms
# import each other, not even through a third.
BASE = {
    *("errors", "types", "units", "keys", "clock", "events"),
    *("config", "codecs", "machine", "hints", "install", "compiling"),
}
BOOKS = {"books", "costs", "policies", "groups"}
FLOORS = [
    BASE,
    BOOKS | {"stores", "shapes"},
    {"transfer", "metrics", "audits", "kv_events"},
    {"offload", "build", "tiers"},
    {"node"},
    {"engine", "connectors", "sim", "plan", "watch"},
    {"server", "commands"},
    {"cli", "__main__", "__init__"},
]
# Heavy or optional libraries, and the only places that may import them at all.
ALLOWED = {
    "torch": {
        "codecs/lossless",
        "codecs/lossless_torch",
        "codecs/lossy",
        "codecs/quantize",
        "stores/device",
        "transfer/cuda",
        "transfer/cuda_copier",
        "transfer/cuda_link",
        "transfer/cuda_stage",
        "transfer/cuda_stages",
        "connectors/sglang",
        "transfer/pinning",
        "engine",
        "connectors/sglang/storage",
        "connectors/vllm/device",
    },
    "numpy": {
        "audits/compare",
        "codecs/lossless",
        "codecs/lossless_numba",
        "plan/probe/memory",
        "engine",
        "sim/places",
        "transfer/cuda_link",
    },
    "triton": {"codecs/lossless_triton", "transfer/cuda_stage", "engine"},
    "transformers": {"engine"},
    "numba": {"compiling", "engine"},
    "llguidance": {"engine/grammar", "engine/grammar_text", "engine/mask_threads"},
    "sglang": {"connectors/sglang"},
    "vllm": {"connectors/vllm", "connectors/vllm_tier"},
    "redis": {"stores/redis", "stores/redis_urls"},
    "obstore": {"stores/s3"},
    "mooncake": {"stores/mooncake_library"},
    "zmq": {"kv_events/publisher"},
    "msgpack": {"kv_events/wire"},
    "cryptography": {"stores/envelope"},
    "prometheus_client": {"metrics", "server", "watch"},
    "httpx": {"watch/http", "commands/speakers", "stores/mooncake"},
    "fastapi": {"server"},
    "starlette": {"server"},
    "pydantic": {"server"},
    "pydantic_core": {"server"},
    "uvicorn": {"server"},
    "opentelemetry": {"server/spans", "server/tracing"},
    "typer": {"cli", "commands"},
    "rich": {"cli", "commands"},
}


@functools.cache
def _trees() -> dict[str, ast.Module]:
    """Each file's path below penstock, without its suffix, and its syntax tree."""
    return {
        str(path.relative_to(ROOT).with_suffix("")): ast.parse(path.read_text())
        for path in sorted(ROOT.rglob("*.py"))
    }


@functools.cache
def _modules() -> dict[str, set[str]]:
    """Each module's path below penstock, with every absolute name it imports."""
    found = {}
    for name, tree in _trees().items():
        names: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name}: relative imports hide the direction"
                module = node.module or ""
                names.add(module)
                names.update(f"{module}.{alias.name}" for alias in node.names)
        found[name] = names
    return found


def _room(module: str) -> str:
    return module.split("/")[0]


def _floor(room: str) -> int:
    for number, rooms in enumerate(FLOORS):
        if room in rooms:
            return number
    raise AssertionError(f"penstock/{room} has no floor: place it in {__file__}")


def _rooms_imported(names: set[str]) -> set[str]:
    return {n.split(".")[1] for n in names if n.startswith("penstock.")} - {"__version__"}


def test_imports_run_one_way() -> None:
    for module, names in _modules().items():
        for other in _rooms_imported(names):
            assert _floor(other) <= _floor(_room(module)), (
                f"penstock/{module} reaches up to {other}"
            )


def test_rooms_import_in_no_circle() -> None:
    imported: dict[str, set[str]] = defaultdict(set)
    for module, names in _modules().items():
        imported[_room(module)] |= _rooms_imported(names) - {_room(module)}
    done: set[str] = set()

    def visit(room: str, path: tuple[str, ...]) -> None:
        assert room not in path, f"a circle of imports: {' -> '.join((*path, room))}"
        if room not in done:
            for other in sorted(imported[room]):
                visit(other, (*path, room))
            done.add(room)

    for room in sorted(imported):
        visit(room, ())


def test_every_room_named_here_exists() -> None:
    rooms = {_room(module) for module in _trees()}
    assert set().union(*FLOORS) == rooms
    for places in ALLOWED.values():
        for place in places:
            assert (ROOT / place).is_dir() or (ROOT / f"{place}.py").is_file(), place


def test_books_and_stores_never_import_each_other() -> None:
    for module, names in _modules().items():
        others = _rooms_imported(names)
        if _room(module) in BOOKS:
            assert "stores" not in others, f"the book {module} imports a store"
        if _room(module) == "stores":
            assert not others & BOOKS, f"the store {module} imports a book"


def test_books_know_no_io_threads_or_clock() -> None:
    worldly = {"os", "io", "time", "threading", "socket", "subprocess", "pathlib", "asyncio"}
    for module, names in _modules().items():
        if _room(module) in BOOKS:
            assert not {n.split(".")[0] for n in names} & worldly, f"{module} is not pure"


def test_heavy_libraries_stay_in_their_rooms() -> None:
    for module, names in _modules().items():
        for library, rooms in ALLOWED.items():
            if any(n.split(".")[0] == library for n in names):
                at_home = any(module == room or module.startswith(f"{room}/") for room in rooms)
                assert at_home, f"penstock/{module} imports {library}"


def test_no_public_class_name_is_defined_twice() -> None:
    """A search for a class finds one thing."""
    homes: dict[str, list[str]] = defaultdict(list)
    for module, tree in _trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module)
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}
