"""vLLM's own pace on a GPU, to stand beside `benchmarks.gpu_engine decode prefill`.

    python -m benchmarks.peers.vllm_pace MODEL_FOLDER

The folder needs only a config.json: weights are made up. Each prompt is new, except where answers
of two lengths are subtracted: the time of a step is what 128 more tokens take.
"""

from __future__ import annotations

import argparse
import json
from statistics import median

from benchmarks.peers.vllm_hits import Prompts, draw, timed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()

    from vllm import LLM, SamplingParams

    llm = LLM(
        options.folder,
        dtype="bfloat16",
        max_model_len=40_000,
        seed=0,
        enable_prefix_caching=True,
        load_format="dummy",
        skip_tokenizer_init=True,
    )

    def seconds(prompts: Prompts, num_tokens: int = 1) -> float:
        params = SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return timed(lambda: llm.generate(asked, params, use_tqdm=False))[0]

    for length in (64, 8_192):
        seconds(draw(1, length, length + 1), 4)
    for length in (8_192, 32_768):
        taken = [seconds(draw(1, length, 100 * length + turn)) for turn in range(options.rounds)]
        print(json.dumps({"prompt": length, "ms": median(taken) * 1e3}), flush=True)
    for batch in (1, 16, 64):
        prompts = draw(batch, 2_048, 77 + batch)
        seconds(prompts)
        steps = []
        for _ in range(options.rounds):
            short = seconds(prompts)
            steps.append((seconds(prompts, 129) - short) / 128)
        print(
            json.dumps({"decode": batch, "context": 2_048, "ms": median(steps) * 1e3}), flush=True
        )
    computed = []
    for turn in range(options.rounds):
        llm.reset_prefix_cache()
        computed.append(seconds(draw(48, 8_192, 5 + turn)))
    print(json.dumps({"prompts": 48, "tokens": 8_192, "seconds": median(computed)}), flush=True)


if __name__ == "__main__":
    main()
