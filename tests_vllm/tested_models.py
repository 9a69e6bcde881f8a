"""What `tests_vllm` runs, as the table in docs/vllm.md. `python tests_vllm/tested_models.py`"""

from __future__ import annotations

from typing import NamedTuple


class Tested(NamedTuple):
    model: str
    groups: str
    where: str


TESTED = {
    "gemma3": Tested("Gemma 3", "full, sliding window", "test_group_windows"),
    "gemma4": Tested("Gemma 4", "full, sliding window; two block sizes", "test_group_windows"),
    "gptoss": Tested("gpt-oss", "full, sliding window", "test_group_windows"),
    "mistral": Tested("Mistral with a window", "sliding window only", "test_group_windows"),
    "llama4": Tested("Llama 4", "full, chunked local attention", "test_group_windows"),
    "granite4": Tested("Granite 4", "full, Mamba2 state", "test_group_states"),
    "falconh1": Tested("Falcon-H1", "full, Mamba2 state", "test_group_states"),
    "nemotronh": Tested("Nemotron-H", "full, Mamba2 state", "test_group_states"),
    "lfm2": Tested("LFM2", "full, short convolution", "test_group_states"),
    "deepseek3": Tested("DeepSeek V3", "MLA; whole prompts on a CPU", "test_group_states"),
    "own_drafter": Tested("Llama with a draft model", "full", "test_group_drafters"),
    "eagle": Tested("Llama with EAGLE", "full", "test_group_drafters"),
    "glm4mtp": Tested("GLM 4 MoE with MTP", "full", "test_group_drafters"),
    "gemma3-tensor": Tested(
        "Gemma 3, tensor parallel 2", "full, sliding window", "test_group_parallel"
    ),
    "deepseek3-tensor": Tested("DeepSeek V3, tensor parallel 2", "MLA", "test_group_parallel"),
    "llama-unequal-pipeline": Tested(
        "Llama, pipeline parallel 2, stages of 3 and 2 layers", "full", "test_group_parallel"
    ),
}


def table() -> str:
    rows = ["| model | KV cache groups | test |", "|---|---|---|"]
    rows += [f"| {one.model} | {one.groups} | `{one.where}` |" for one in TESTED.values()]
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
