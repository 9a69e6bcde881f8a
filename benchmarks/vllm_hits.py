"""Hits in vLLM: Penstock, vLLM's own offloading, LMCache, recomputing, and the link's limit.

    python -m benchmarks.vllm_hits gpu [--systems none,native,penstock,lmcache]
    python -m benchmarks.vllm_hits cpu --model FOLDER --python VENV/bin/python

On a GPU: Llama-3.1-8B's shapes with dummy weights. On a CPU: a real model. Every system runs in its
own process. A "hit" that is faster than the link can be is marked as not a hit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
KV_BYTES = 32 * 2 * 8 * 128 * 2  # a token's


def run_system(python: str, system: str, folder: str, options: list[str]) -> dict[str, Any]:
    # -P: the script's folder contains a file lmcache.py, which is not the package.
    command = [python, "-P", str(HERE / "peers" / "vllm_hits.py"), system, folder, *options]
    started = time.monotonic()
    with tempfile.NamedTemporaryFile("w+", prefix=f"{system}-", suffix=".log", delete=False) as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, text=True)
        log.seek(0)
        text = log.read()
    print(f"{system}: {time.monotonic() - started:.0f} s, log in {log.name}", file=sys.stderr)
    for line in text.splitlines():
        if line.startswith("RESULT "):
            return dict(json.loads(line.removeprefix("RESULT ")))
    tail = "\n".join(text.splitlines()[-25:])
    print(f"{system} ended with {done.returncode}:\n{tail}", file=sys.stderr)
    return {}


def measure_link(python: str) -> float:
    """Bytes per second of one large pinned copy to the GPU."""
    code = (
        "import torch,time\n"
        "h=torch.empty(4<<30,dtype=torch.uint8,pin_memory=True);d=torch.empty_like(h,device='cuda')\n"
        "best=0\n"
        "for _ in range(5):\n"
        " torch.cuda.synchronize();t=time.perf_counter();d.copy_(h,non_blocking=True)\n"
        " torch.cuda.synchronize();best=max(best,(4<<30)/(time.perf_counter()-t))\n"
        "print(best)"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def show(results: dict[str, dict[str, Any]], link: float | None) -> None:
    def cell(seconds: float | None, tokens: float | None, prompt: int) -> str:
        if not seconds:
            return "-"
        text = f"{seconds * 1e3:.1f}"
        if link is not None and tokens and tokens * KV_BYTES / seconds > 1.05 * link:
            return text + " (faster than the link: not a hit)"
        if tokens is not None and tokens < 0.9 * prompt:
            return text + f" ({tokens:.0f} tokens hit)"
        return text

    names = [name for name, found in results.items() if found]
    lengths = results[names[0]]["first"]
    print("\n| prompt tokens | " + " | ".join(f"{name}, ms" for name in names) + " | link, ms |")
    print("|---" * (len(names) + 2) + "|")
    for length in lengths:
        cells = []
        for name in names:
            first = results[name]["first"][length]
            if name == "none":
                cells.append(f"{first['computed'] * 1e3:.1f} (computed)")
            else:
                cells.append(cell(first["hit"], first["hit_tokens"], int(length)))
                if not first["same"]:
                    cells[-1] += " DIFFERENT ANSWER"
        limit = f"{int(length) * KV_BYTES / link * 1e3:.1f}" if link else "-"
        print(f"| {int(length):,} | " + " | ".join(cells) + f" | {limit} |")
    if not all("bulk" in results[name] for name in names):
        return
    base = results.get("none", {})
    print("\n| | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 1) + "|")
    rows: dict[str, list[str]] = {"computed, s": [], "against none": [], "hits, s": []}
    rows |= {"hits, GB/s": [], "of the link": [], "decode step, ms": [], "decode against none": []}
    for name in names:
        bulk, decode = results[name]["bulk"], results[name].get("decode")
        rows["computed, s"].append(f"{bulk['computed']:.2f}")
        ratio = bulk["computed"] / base["bulk"]["computed"] - 1 if base else 0
        rows["against none"].append(f"{ratio:+.2%}")
        rate = bulk["hit_tokens"] * KV_BYTES / bulk["hit"] if bulk["hit"] else None
        rows["hits, s"].append(f"{bulk['hit']:.2f}" if rate else "-")
        rows["hits, GB/s"].append(f"{rate / 1e9:.1f}" if rate else "-")
        rows["of the link"].append(f"{rate / link:.2f}" if rate and link else "-")
        rows["decode step, ms"].append(f"{decode * 1e3:.2f}" if decode else "-")
        both = decode and base.get("decode")
        rows["decode against none"].append(f"{decode / base['decode'] - 1:+.2%}" if both else "-")
    for title, cells in rows.items():
        print(f"| {title} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device", choices=("gpu", "cpu"))
    parser.add_argument("--systems", default="none,native,penstock,lmcache")
    parser.add_argument("--lengths", default="")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--model")
    parser.add_argument("--out", type=Path)
    parser.epilog = "All other options are those of benchmarks/peers/vllm_hits.py."
    options, rest = parser.parse_known_args()
    on_gpu = options.device == "gpu"
    results: dict[str, dict[str, Any]] = {}
    link = measure_link(options.python) if on_gpu else None
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(LLAMA))
        given = ["--lengths", options.lengths or "512,2048,8192,32768", "--dummy"]
        given += ["--host-gib", "60", "--settle", "40", "--num-prompts", "48"]
        given += ["--decode-batch", "64"]
        if not on_gpu:
            given = ["--lengths", options.lengths or "700,4000", "--dtype", "float32"]
            given += ["--max-model-len", "4096", "--host-gib", "4", "--rounds", "3"]
        for system in options.systems.split(","):
            model = folder if on_gpu else options.model
            results[system] = run_system(options.python, system, model, given + rest)
            if options.out is not None:
                options.out.write_text(json.dumps({"link": link, "systems": results}, indent=1))
    if link is not None:
        print(f"link: {link / 1e9:.1f} GB/s")
    show(results, link)


if __name__ == "__main__":
    main()
