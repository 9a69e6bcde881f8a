"""The code of docs/vllm.md runs."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from conftest import MODEL

PAGE = Path(__file__).parent.parent / "docs" / "vllm.md"


def test_the_page_shows_what_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    code = code.replace("LLM(model=MODEL,", "LLM(model=MODEL, **SMALL,")
    small = {"dtype": "float32", "max_model_len": 1024, "enforce_eager": True}
    names = {"__name__": "docs", "MODEL": MODEL, "SMALL": small}
    exec(compile(code, PAGE.name, "exec"), names)
    assert names["again"].outputs[0].token_ids == names["first"].outputs[0].token_ids
    assert names["again"].kv_transfer_params["penstock"]["loaded_tokens"]["host"] > 0
    assert os.listdir("kv")
    names["llm"].llm_engine.engine_core.shutdown()
