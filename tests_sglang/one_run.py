"""One run of SGLang on a CPU: answers prompts, and ends as if it were killed.

Arguments: the model's folder, the flag's value for the storage, the prompts. Prints a line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main() -> None:
    from sglang.srt.entrypoints.engine import Engine

    from penstock.connectors.sglang.settings import SECTION

    model, extra_config, prompts = sys.argv[1:]
    engine = Engine(
        model_path=model,
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        attention_backend="torch_native",
        sampling_backend="pytorch",
        disable_overlap_schedule=True,
        disable_cuda_graph=True,
        max_total_tokens=2048,
        page_size=16,
        enable_cache_report=True,
        enable_hierarchical_cache=True,
        hicache_ratio=2.0,
        hicache_io_backend="direct",
        hicache_mem_layout="layer_first",
        hicache_write_policy="write_through",
        hicache_storage_prefetch_policy="wait_complete",
        hicache_storage_backend="dynamic",
        hicache_storage_backend_extra_config=extra_config,
        log_level="warning",
    )
    time.sleep(3)  # the index of the disk is read in the background
    answers = []
    for prompt in json.loads(prompts):
        sampling = {"temperature": 0, "max_new_tokens": 8}
        answer = engine.generate(input_ids=prompt, sampling_params=sampling, return_logprob=True)
        facts = answer["meta_info"]
        answers.append(
            {
                "tokens": answer["output_ids"],
                "log_probabilities": [each[0] for each in facts["output_token_logprobs"]],
                "stored": (facts.get("cached_tokens_details") or {}).get("storage", 0),
                "cached": facts["cached_tokens"],
            }
        )
    wait_until_stored(Path(json.loads(extra_config)[SECTION]["disk_path"]))
    print("ANSWERS", json.dumps(answers), flush=True)
    engine.shutdown()


def wait_until_stored(folder: Path) -> None:
    """Pages are stored in the background: until no file of theirs changes for 3 s."""
    seen: dict[Path, int] = {}
    since = began = time.monotonic()
    while time.monotonic() - since < 3 and time.monotonic() - began < 60:
        now = {path: path.stat().st_mtime_ns for path in folder.rglob("slab-*")}
        if now != seen:
            seen, since = now, time.monotonic()
        time.sleep(0.1)


if __name__ == "__main__":
    main()
