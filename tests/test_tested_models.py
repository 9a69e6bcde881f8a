"""The table of tested models in docs/vllm.md is what `tests_vllm` runs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def the_list() -> Any:
    path = ROOT / "tests_vllm" / "tested_models.py"
    spec = importlib.util.spec_from_file_location("tested_models", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_in_the_docs_is_the_one_that_is_tested() -> None:
    page = (ROOT / "docs" / "vllm.md").read_text()
    found = re.search(r"<!-- tested models -->\n(.*?)<!-- end of tested models -->", page, re.S)
    assert found is not None
    assert found[1].strip() == the_list().table(), "run python tests_vllm/tested_models.py"


def test_every_row_names_a_case_that_its_test_runs_and_no_case_is_missing() -> None:
    wanted = the_list().TESTED
    cases: set[str] = set()
    for path in sorted((ROOT / "tests_vllm").glob("test_group_*.py")):
        if path.stem == "test_group_soak":
            continue
        text = path.read_text()
        listed = re.search(r"params=\[([^\]]*)\]\)", text)
        names = re.findall(r'id="([^"]+)"', text)
        if not names:
            assert listed is not None, path
            names = re.findall(r'"([^"]+)"', listed[1])
        cases.update(names)
        assert {name for name, one in wanted.items() if one.where == path.stem} == set(names)
    assert cases == set(wanted)
