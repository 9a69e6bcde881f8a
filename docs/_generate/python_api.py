"""Generate the Python API page: signatures, fields and docstrings, read from the source.

Nothing is imported, so no torch is needed. A comment after a field is its description.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import markup

ROOT = Path(__file__).parents[2]

# The documented names, by task. The build fails if one of them no longer exists.
PARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "Generate": {
        "penstock.engine.llm": ("LLM",),
        "penstock.engine.params": ("SamplingParams", "KvResidency"),
        "penstock.engine.structure": ("StructuredOutputsParams",),
        "penstock.config.options": ("EngineOptions",),
        "penstock.engine.outputs": (
            "RequestOutput",
            "CompletionOutput",
            "RequestMetrics",
            "Logprob",
        ),
    },
    "Hints": {"penstock.hints": ("Hints", "Hint")},
    "Under asyncio": {
        "penstock.engine.open": ("open_engine",),
        "penstock.engine.service": ("Service", "Stream", "Delta", "Stopped"),
    },
    "In vLLM": {"penstock.connectors.vllm.settings": ("VllmSettings", "transfer_config")},
    "Settings": {
        "penstock.config": (
            "load_config",
            "describe",
            "Config",
            "HostConfig",
            "DiskConfig",
            "RemoteConfig",
            "TransferConfig",
            "NodeConfig",
        ),
        "penstock.units": ("parse_bytes", "format_bytes"),
    },
    "The core": {
        "penstock.build": ("build_offloader",),
        "penstock.offload": ("Offloader",),
        "penstock.keys": ("Namespace", "KeyChain"),
        "penstock.types": ("BlockSpec", "Match", "Run", "Done", "Verdict", "Tier"),
        "penstock.stores.host": ("HostArena",),
    },
    "Load or compute": {
        "penstock.costs.rates": ("LinkRate", "PrefillRate", "break_even_tokens"),
    },
    "Metrics": {"penstock.metrics": ("Metrics",)},
    "Planning": {
        "penstock.shapes.catalog": ("find_gpu", "find_model"),
        "penstock.shapes.sizing": ("find_shape",),
        "penstock.shapes.packing": ("pack_shape",),
        "penstock.plan.fit": ("Demand", "Hardware"),
        "penstock.plan.planner": ("PlannedModel", "Plan", "make_plan"),
        "penstock.watch.samples": ("read_samples",),
        "penstock.watch.adviser": ("advise",),
    },
    "The simulator": {
        "penstock.sim.workloads": ("generate", "knobs_of"),
        "penstock.sim.trace": ("Trace", "TraceRequest", "TraceSegment"),
        "penstock.sim.formats": ("read_trace", "write_trace", "read_record"),
        "penstock.sim.settings": ("SimulatedHardware",),
        "penstock.sim.simulator": ("simulate",),
        "penstock.sim.fleet": ("FleetConfig", "Roles", "simulate_fleet"),
        "penstock.sim.replay": ("replay", "new_ledger"),
        "penstock.sim.optimum": ("optimum", "unbounded"),
    },
    "Errors": {
        "penstock.errors": (
            "PenstockError",
            "ConfigError",
            "TraceError",
            "StoreError",
            "Missing",
            "Corrupt",
            "Full",
            "ReadOnly",
            "Locked",
            "Foreign",
            "BookError",
        )
    },
}
SHORT = ("LLM", "SamplingParams", "StructuredOutputsParams")  # importable from the package itself

_HEAD = """# The Python API

What applications can import, generated from the source. Import `LLM`, `SamplingParams` and
`StructuredOutputsParams` from `penstock`, and everything else from the module shown. Names that
start with `_`, and modules that are not listed here, may change at any time.

"""


class Found(NamedTuple):
    node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    lines: list[str]  # of its file


class Field(NamedTuple):
    name: str
    kind: str
    default: str
    comment: str


def page() -> str:
    lines = [_HEAD]
    for part, modules in PARTS.items():
        lines += [f"## {part}", ""]
        for module, names in modules.items():
            for name in names:
                lines += _entry(module, name)
    return "\n".join(lines)


def _find(module: str, name: str) -> Found:
    """Find where a name is defined: in this module, or in the one it is imported from."""
    path = ROOT / Path(*module.split("."))
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and name in (alias.name for alias in node.names):
            return _find(str(node.module), name)
        if (
            isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name == name
        ):
            return Found(node, text.splitlines())
    raise LookupError(f"{module} has no {name}: correct PARTS in {__file__}")


def _entry(module: str, name: str) -> list[str]:
    found = _find(module, name)
    place = "penstock" if name in SHORT else module
    anchor = f"{module}.{name}".replace(".", "-").lower()
    lines = [f"### `{name}` {{ #{anchor} }}", "", "```python", f"from {place} import {name}"]
    if isinstance(found.node, ast.ClassDef):
        return [*lines, *_class(found.node, found.lines)]
    return [*lines, "", *_signature(found.node), "```", "", *_doc(found.node)]


def _class(node: ast.ClassDef, source: list[str]) -> Iterator[str]:
    made = next((each for each in _functions(node) if each.name == "__init__"), None)
    if made is not None:
        yield ""
        yield from _signature(made, node.name)
    yield "```"
    yield ""
    yield from _doc(node)
    if made is not None:
        yield from _doc(made)
    fields = list(_fields(node, source))
    if fields:
        rows = [
            (markup.code(field.name), markup.code(field.kind), field.default, field.comment)
            for field in fields
        ]
        if _is_enum(node):
            rows = [(name, comment) for name, _, _, comment in rows]
        heads = ("", "") if _is_enum(node) else ("field", "type", "default", "")
        yield from markup.table(heads, rows)
    for function in _functions(node):
        if function.name.startswith("_"):
            continue
        if any(
            isinstance(each, ast.Name) and each.id == "property" for each in function.decorator_list
        ):
            kind = f": {ast.unparse(function.returns)}" if function.returns else ""
            yield from ["```python", f"{node.name}.{function.name}{kind}", "```", ""]
        else:
            yield from [
                "```python",
                *_signature(function, f"{node.name}.{function.name}"),
                "```",
                "",
            ]
        yield from _doc(function)


def _functions(node: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for each in node.body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            yield each


def _signature(node: ast.stmt, name: str | None = None) -> list[str]:
    """The signature as a call, with one parameter per line if one line is too short."""
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    parameters = ast.parse(ast.unparse(node)).body[0].args  # a copy that can be modified
    if name is not None and parameters.args:
        parameters.args.pop(0)  # self or cls
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    if node.name == "__init__":
        result = ""
    start = "await " if isinstance(node, ast.AsyncFunctionDef) else ""
    call = f"{start}{name or node.name}"
    line = f"{call}({ast.unparse(parameters)}){result}"
    if len(line) <= 88:
        return [line]
    return [f"{call}(", *(f"    {each}," for each in _split(ast.unparse(parameters))), f"){result}"]


def _split(text: str) -> Iterable[str]:
    """Split at commas outside of brackets."""
    depth, part = 0, ""
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            yield part.strip()
            part = ""
        else:
            part += letter
    yield part.strip()


def _doc(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    text = ast.get_docstring(node)
    return [markup.prose(text), ""] if text else []


def _is_enum(node: ast.ClassDef) -> bool:
    return any("Enum" in ast.unparse(base) for base in node.bases)


def _fields(node: ast.ClassDef, source: list[str]) -> Iterator[Field]:
    """The fields of a dataclass, named tuple or enum, described by the comments after them."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            name, kind, value = each.target.id, ast.unparse(each.annotation), each.value
        elif (
            _is_enum(node)
            and isinstance(each, ast.Assign)
            and isinstance(each.targets[0], ast.Name)
        ):
            name, kind, value = each.targets[0].id, "", each.value
        else:
            continue
        if name.startswith("_"):
            continue
        yield Field(name, kind, _default(value), markup.cell(_comment(each, source)))


def _default(value: ast.expr | None) -> str:
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        value = given.get("default")
        if "default_factory" in given:
            return markup.code(f"{ast.unparse(given['default_factory'])}()")
    if option := _option(value):
        value = option.args[0]
    return "" if value is None else markup.code(ast.unparse(value))


def _option(value: ast.expr | None) -> ast.Call | None:
    """Return the call if the field is made by `penstock.config.options.option(default, help)`."""
    is_option = isinstance(value, ast.Call) and ast.unparse(value.func) == "option"
    return value if is_option else None


def _comment(node: ast.stmt, lines: list[str]) -> str:
    """Return a field's help text, or the comment after it or in the lines above it."""
    if option := _option(getattr(node, "value", None)):
        return ast.literal_eval(option.args[1])
    if behind := re.search(r"\s{2}# (.*)$", lines[(node.end_lineno or node.lineno) - 1]):
        return behind[1]
    above: list[str] = []
    index = node.lineno - 2
    while index >= 0 and (match := re.match(r"\s*# (.*)$", lines[index])):
        above.insert(0, match[1])
        index -= 1
    return " ".join(above)
