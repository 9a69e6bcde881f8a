"""The tokens that open a turn, from the files of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.connectors.vllm.turn_tokens import border_ids, opens_turn

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"


def write(folder: Path, name: str, content: Any) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / name).write_text(text, encoding="utf-8")


def added(*contents: str) -> list[dict[str, Any]]:
    return [{"id": 100 + n, "content": c, "special": True} for n, c in enumerate(contents)]


@pytest.mark.parametrize(
    "content",
    [
        *("<|im_start|>", "<start_of_turn>", "<|start|>", "<|start_header_id|>", "[INST]"),
        *("<|user|>", "<|assistant|>", "<|system|>", "<|observation|>", "<|header_start|>"),
        *("<｜User｜>", "<｜Assistant｜>", "<|im_user|>", "<|start_of_role|>", "<|turn>"),
        *("[TOOL_RESULTS]", "[AVAILABLE_TOOLS]", "<tool_response>", "[SYSTEM_PROMPT]"),
        *("<|START_OF_TURN_TOKEN|>", "<｜tool▁outputs▁begin｜>"),
    ],
)
def test_tokens_that_open_a_turn(content: str) -> None:
    assert opens_turn(content)


@pytest.mark.parametrize(
    "content",
    [
        *("<|im_end|>", "<end_of_turn>", "<|end|>", "<|end_header_id|>", "[/INST]", "<turn|>"),
        *("<|begin_of_text|>", "<s>", "</s>", "<bos>", "<|eot_id|>", "<|return|>", "<|message|>"),
        *("<start_of_image>", "<|vision_start|>", "<think>", "</think>", "<tool_call>"),
        *("</tool_response>", "<｜tool▁calls▁begin｜>", "<｜begin▁of▁sentence｜>", "<|channel|>"),
    ],
)
def test_tokens_that_do_not(content: str) -> None:
    assert not opens_turn(content)


def test_tokens_are_taken_from_the_tokenizer_and_the_template(tmp_path: Path) -> None:
    tokens = added("<|im_start|>", "<|im_end|>", "<|user|>")
    write(tmp_path, "tokenizer.json", {"added_tokens": tokens})
    write(tmp_path, "chat_template.jinja", CHATML)
    assert border_ids(tmp_path) == {100}, "<|user|> is not in the template"


def test_an_older_folder_has_both_in_the_tokenizers_configuration(tmp_path: Path) -> None:
    decoder = {"5": {"content": "<|im_start|>"}, "6": {"content": "<|im_end|>"}}
    config = {"added_tokens_decoder": decoder, "chat_template": CHATML}
    write(tmp_path, "tokenizer_config.json", config)
    assert border_ids(str(tmp_path)) == {5}


def test_several_templates_count_together(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "[INST]"},
        {"name": "tool_use", "template": "[TOOL_RESULTS]"},
        "not a template",
    ]
    write(tmp_path, "tokenizer_config.json", {"chat_template": named})
    tokens = added("[INST]", "[/INST]", "[TOOL_RESULTS]")
    write(tmp_path, "tokenizer.json", {"added_tokens": [*tokens, "odd", {"id": None}]})
    assert border_ids(tmp_path) == {100, 102}


def test_the_template_of_a_processor(tmp_path: Path) -> None:
    write(tmp_path, "chat_template.json", {"chat_template": "<start_of_turn>"})
    write(tmp_path, "tokenizer.json", {"added_tokens": added("<start_of_turn>")})
    assert border_ids(tmp_path) == {100}


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"chat_template.jinja": CHATML},
        {"tokenizer.json": {"added_tokens": added("<|im_start|>")}},
        {"chat_template.jinja": CHATML, "tokenizer.json": "{broken"},
        {"chat_template.jinja": CHATML, "tokenizer.json": "[1, 2]"},
        {"chat_template.jinja": CHATML, "tokenizer.json": {"added_tokens": 7}},
        {"tokenizer_config.json": {"chat_template": 7, "added_tokens_decoder": [1]}},
        {"chat_template.jinja": CHATML, "tokenizer.json": "[" * 100_000},
    ],
)
def test_unreadable_folders_give_no_tokens(tmp_path: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        write(tmp_path, name, content)
    assert border_ids(tmp_path) == frozenset()


def test_a_folder_that_does_not_exist_or_holds_other_bytes(tmp_path: Path) -> None:
    assert border_ids(tmp_path / "absent") == frozenset()
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe\x00")
    assert border_ids(tmp_path) == frozenset()
