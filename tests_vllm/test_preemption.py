"""A KV space too small for its requests: preempted, saved, loaded, and the answers the same."""

from __future__ import annotations

from pathlib import Path

from conftest import BLOCK, Faults, Start, Vllm, tokens


def test_preempted_requests_go_on_where_they_were(
    start: Start, plain: Vllm, faults: Faults, tmp_path: Path
) -> None:
    prompts = [tokens(2 * BLOCK + 9 * n, 100 + n) for n in range(5)]
    expected = plain.answers(prompts, 2 * BLOCK)
    before = plain.loaded_blocks()
    # Five of up to six blocks want room: there are 16, and one that vLLM keeps for itself.
    room = {"num_gpu_blocks_override": 17, "max_model_len": 512}
    small = start(disk=tmp_path / "kv", given=room, always_load=True)
    outputs = small.ask(prompts, 2 * BLOCK)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert small.metric("vllm:num_preemptions") > 0
    assert small.loaded_blocks() > before
    small.check_nothing_is_held()
