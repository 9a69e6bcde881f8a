"""Every Triton kernel compiles for a GPU. There need not be one (see `gpu_kernels`)."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


def compile_all(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    settings = {**os.environ, "TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    settings.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.engine.gpu_kernels", *arguments]
    return subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True)


def launched(tree: ast.Module) -> Iterator[str]:
    """The functions that a file launches on a grid: `name[grid](...)`."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Subscript(value=ast.Name(id=name))):
                yield name


def kernels() -> set[str]:
    found = set()
    for path in (ROOT / "penstock").rglob("*.py"):
        source = path.read_text()
        if "triton.jit" not in source:
            continue
        tree = ast.parse(source)
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found |= {f"{module}.{name}" for name in launched(tree) if name in functions}
    return found


def test_all_compile_for_the_shapes_of_real_models(tmp_path: Path) -> None:
    ended = compile_all(tmp_path)
    assert ended.returncode == 0, ended.stderr[-4000:]
    compiled = {line.split()[0] for line in ended.stdout.splitlines() if line[0] != "#"}
    assert compiled == kernels()
    assert len(compiled) > 20


def test_a_fault_that_the_interpreter_does_not_see_is_found(tmp_path: Path) -> None:
    ended = compile_all(tmp_path, "faulty")
    assert ended.returncode == 1
    assert "if CAP:" in ended.stderr
