"""Documents reused anywhere on a GPU: first tokens, against computing and against a prefix hit.

    python -m benchmarks.gpu_anywhere

Llama-3.1-8B's shapes in bf16: a head of 64 tokens, 8 documents of 4,096 tokens in another order
each time, a question of 64. The documents are in DRAM, each alone. Computing everything is the
limit from above; a hit of the whole prompt as a prefix, also from DRAM, the one from below. With
`--tiny` it runs at a small scale on a CPU, to show that it works.
"""

from __future__ import annotations

import argparse
import random
import time
from statistics import median
from typing import Any

from benchmarks.gpu_engine import Scale, forget, prompt_of, say
from penstock.costs.choose import LoadChoice
from penstock.engine.engine import Engine
from penstock.engine.params import SamplingParams
from penstock.engine.request import Request

WAYS: dict[str, dict[str, Any]] = {
    "link": {"mode": "link"},
    "blend 5%": {"mode": "blend", "blend_share": 0.05},
    "blend 15%": {"mode": "blend", "blend_share": 0.15},
    "blend 30%": {"mode": "blend", "blend_share": 0.30},
    "none": {"mode": "none"},
}
NUM_DOCUMENTS = 8


def serve(
    engine: Engine,
    prompt: list[int],
    segments: list[tuple[int, int]],
    mending: dict[str, Any] | None,
    tenant: str = "",
) -> tuple[float, Request]:
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, kv_mending=mending)
    started = time.perf_counter()
    request = engine.add(str(started), prompt, params, segments=segments, tenant=tenant)
    while engine.has_work:
        engine.step()
    return time.perf_counter() - started, request


def measure(scale: Scale, rounds: int) -> None:
    size = max(256, scale.tokens(4_096))
    documents = [prompt_of(size, number) for number in range(NUM_DOCUMENTS)]
    length = NUM_DOCUMENTS * size + 128
    bounds = [(64 + number * size, 64 + (number + 1) * size) for number in range(NUM_DOCUMENTS)]
    seeds = iter(range(10_000, 20_000))

    def shuffled() -> list[int]:
        seed = next(seeds)
        order = random.Random(seed).sample(documents, NUM_DOCUMENTS)
        return [*prompt_of(64, seed), *(t for each in order for t in each), *prompt_of(64, -seed)]

    # DRAM holds the documents, which each prompt uses again, and the latest prompts.
    with scale.engine(3 * length, 8 * length, max_num_seqs=16) as engine:
        engine.scheduler._choose = lambda match, num_past: LoadChoice(match.num_blocks)
        computed, found = [], []
        for number in range(rounds + 1):
            prompt = shuffled()
            computed.append(serve(engine, prompt, [], None)[0])
            forget(engine)
            found.append(serve(engine, prompt, [], None)[0])
            forget(engine)
            if not number:  # kernels are compiled
                computed, found = [], []
        say({"way": "computed", "ms": median(computed) * 1e3, "tokens": length})
        say(
            {
                "way": "prefix hit",
                "ms": median(found) * 1e3,
                "gain": median(computed) / median(found),
            }
        )
        for way, mending in WAYS.items():
            taken = []
            for number in range(rounds + 2):  # the first has the documents computed
                forget(engine)
                seconds, request = serve(engine, shuffled(), bounds, mending)
                if number > 1:
                    taken.append(seconds)
            num_reused = request.num_reused_tokens
            if num_reused + request.num_mended_tokens != NUM_DOCUMENTS * size:
                raise SystemExit(f"{way}: only {num_reused} tokens were reused")
            if request.num_loaded_tokens != NUM_DOCUMENTS * size:
                raise SystemExit(f"{way}: only {request.num_loaded_tokens} tokens were loaded")
            row = {"way": way, "ms": median(taken) * 1e3, "gain": median(computed) / median(taken)}
            row |= {"reused": num_reused, "mended": request.num_mended_tokens}
            say(row | {"of_prefix_hit": median(taken) / median(found)})


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_anywhere",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    measure(Scale(options.tiny), options.rounds)


if __name__ == "__main__":
    main()
