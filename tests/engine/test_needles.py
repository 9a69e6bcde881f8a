"""Facts hidden in a 4,000-token prompt are recalled alike, wherever its KV has been meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny import always_load

from penstock import LLM, SamplingParams

NEEDLES = {
    "What is the secret number?": "The secret number is 7421. Remember it.",
    "Which city does the courier live in?": "The courier lives in Lisbon.",
    "What colour is the gate?": "The gate is painted green.",
}
# So small a model does not find the gate, wherever its KV is: that answer is only compared.
RECALLED = ("7421", "Lisbon")
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def haystack(tokenizer: Any, num_tokens: int) -> str:
    """Lines of a dull ledger, with the needles spread among them."""
    lines = [
        f"Entry {number}: {number * 37 % 100} sacks of grain left for the mill at "
        f"{number % 12 + 1} o'clock."
        for number in range(num_tokens // 20)
    ]
    for place, needle in zip((0.15, 0.5, 0.85), NEEDLES.values(), strict=True):
        lines.insert(int(place * len(lines)), needle)
    while len(tokenizer("\n".join(lines))["input_ids"]) > num_tokens:
        lines.pop()
    return "\n".join(lines)


def test_needles_are_found_alike_with_everything_offloaded(tmp_path: Path) -> None:
    sizes = {"kv_offloading_size": 0.75, "device_kv_gib": 0.75}
    with LLM("smollm2-135m", disk_path=str(tmp_path / "kv"), disk_size=1, **sizes) as llm:
        engine = llm.engine
        assert engine.offloader is not None
        always_load(engine)
        text = haystack(engine.loaded.tokenizer, 4000)
        talks = [
            [{"role": "user", "content": f"Read this.\n{text}\n\n{question}"}]
            for question in NEEDLES
        ]

        def ask() -> list[Any]:
            return [llm.chat(talk, GREEDY)[0] for talk in talks]

        resident = ask()
        assert len(resident[0].prompt_token_ids) > 3900
        assert resident[0].metrics.num_loaded_tokens == 0
        # Once in DRAM, once on disk alone: each time all that the device held is forgotten.
        for empty_host in (False, True):
            engine.offloader.drain()
            engine.step()
            engine.pool.forget()
            if empty_host:
                assert engine.offloader.empty_host() > 60
            again = ask()
            assert again[0].metrics.num_loaded_tokens > 3800
            for before, after in zip(resident, again, strict=True):
                assert after.outputs[0].token_ids == before.outputs[0].token_ids
        texts = [output.outputs[0].text for output in resident]
        for fact, text in zip(RECALLED, texts, strict=False):
            assert fact in text, "the model has not read what it was given"
