"""What lossy KV costs: the same prompts, with their KV as computed and after each codec.

    python -m benchmarks.codec_quality --prompts 200

The KV of each prompt is computed once. Then all its full blocks go through each codec, as if they
had been stored and loaded, and the model continues from there: it computes the tokens after the
last full block, and
- reads the text that follows (perplexity; KL of the next token's distribution, from raw's),
- answers greedily with 32 tokens (equal to raw's answer or not),
- looks for facts hidden in long prompts (found or not).
`raw again` computes everything a second time from the same KV: what differs there is the device's
doing, not a codec's. `lossless` must give exactly what `raw` gives, wherever `raw again` does; if
not, the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeAlias

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from benchmarks.codec_prompts import (
    NEEDLE_TOKENS,
    NEEDLES_PER_LENGTH,
    digest,
    needle_prompts,
    text_prompts,
)
from penstock.codecs.layout import KvLayout
from penstock.codecs.lossless import LosslessCodec
from penstock.codecs.lossless_format import LosslessFormat, fit_lossless
from penstock.codecs.lossy import open_lossy
from penstock.codecs.names import CODECS, LOSSLESS, RAW
from penstock.engine.open import default_dtype

BLOCK_TOKENS = 16
ANSWER_TOKENS = 32
NEEDLE_ANSWER_TOKENS = 12
RAW_AGAIN = "raw again"
_BLOCKS_AT_ONCE = 64  # quantizing needs several times the memory of the blocks

# Raw bytes of blocks in, [blocks, bytes], what a load would give out, and which blocks fitted.
Through: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(slots=True)
class Quality:
    """The sums of one codec over all prompts. Whatever is compared is compared with raw."""

    codec: str
    ratio: float  # packed bytes over raw bytes
    num_blocks: int = 0
    num_changed: int = 0  # blocks of which a bit differs from raw
    num_not_kept: int = 0  # blocks that the codec cannot pack: computed again, so they are raw here
    num_predicted: int = 0
    log_loss: float = 0.0
    kl: list[float] = field(default_factory=list)  # each prompt's mean over its continuation
    num_same_tokens: list[int] = field(default_factory=list)  # leading tokens of each answer
    found: list[bool] = field(default_factory=list)  # of each needle

    @property
    def perplexity(self) -> float:
        return math.exp(self.log_loss / self.num_predicted) if self.num_predicted else math.nan

    @property
    def mean_kl(self) -> float:
        return math.fsum(self.kl) / len(self.kl) if self.kl else math.nan

    @property
    def num_equal(self) -> int:
        return sum(same == ANSWER_TOKENS for same in self.num_same_tokens)

    @property
    def mean_same_tokens(self) -> float:
        return sum(self.num_same_tokens) / max(1, len(self.num_same_tokens))


# What the results of several processes are added up from: numbers and lists.
SUMMED = [each.name for each in fields(Quality) if each.name not in ("codec", "ratio")]


@dataclass(frozen=True, slots=True)
class Reader:
    """A model, and the codecs through which its KV goes."""

    model: Any
    head: Tensor  # the model's, in float32
    codecs: dict[str, Through]
    whole_tokens: int
    one_by_one: bool
    qualities: dict[str, Quality]

    @property
    def device(self) -> Any:
        return self.model.device

    def stored(self, tokens: Sequence[int]) -> tuple[list[DynamicCache], Tensor]:
        """For each codec the KV of the prompt's full blocks, and the tokens left to compute."""
        # As in the engine: at least the last token is computed.
        num_stored = (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        computed = DynamicCache()
        prompt = torch.tensor([tokens], device=self.device)
        self.model.model(prompt, past_key_values=computed, use_cache=True)
        blocks = _blocks_of(computed, num_stored)
        num_lossy = max(0, len(blocks) - -(-self.whole_tokens // BLOCK_TOKENS))
        caches = []
        for name, through in self.codecs.items():
            quality = self.qualities[name]
            pieces = []
            for piece in blocks[:num_lossy].split(_BLOCKS_AT_ONCE):
                if not len(piece):
                    continue
                raw = piece.flatten(1).view(torch.uint8)
                result, fits = through(raw)
                result = torch.where(fits[:, None], result, raw)
                quality.num_not_kept += int((~fits).sum())
                quality.num_changed += int((result != raw).any(1).sum())
                pieces.append(result.view(piece.dtype).view(piece.shape))
            quality.num_blocks += num_lossy
            whole = torch.cat([*pieces, blocks[num_lossy:]])
            caches.append(_cache_of(whole, self.model.dtype))
        return caches, prompt[:, num_stored:]

    def logits(self, tokens: Tensor, cache: DynamicCache) -> Tensor:
        """In float32, so that the head's rounding hides nothing: [rows, tokens, vocabulary]."""
        hidden = self.model.model(tokens, past_key_values=cache, use_cache=True).last_hidden_state
        return torch.nn.functional.linear(hidden.float(), self.head)

    def answer(self, first: Tensor, cache: DynamicCache, num_tokens: int) -> list[list[int]]:
        """Greedy answers of all rows, from the logits of their first tokens: [rows, vocabulary]."""
        chosen = [first.argmax(-1)]
        while len(chosen) < num_tokens:
            chosen.append(self.logits(chosen[-1][:, None], cache)[:, -1].argmax(-1))
        answers: list[list[int]] = torch.stack(chosen, 1).tolist()
        return answers

    def batches(self, caches: list[DynamicCache]) -> Iterator[tuple[list[str], DynamicCache]]:
        """All codecs as rows of one batch, or each alone: on some devices the rounding of a row
        depends on its place in the batch."""
        names = list(self.codecs)
        if self.one_by_one:
            yield from (([name], cache) for name, cache in zip(names, caches, strict=True))
            return
        together = DynamicCache()
        for number in range(len(caches[0].layers)):
            layers = [cache.layers[number] for cache in caches]
            keys, values = [layer.keys for layer in layers], [layer.values for layer in layers]
            together.update(torch.cat(keys), torch.cat(values), number)
        yield names, together


def _blocks_of(cache: DynamicCache, num_tokens: int) -> Tensor:
    """The engine's blocks in bfloat16: [block, layer, kind, token, head, dim]."""
    layers = [torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers]
    layers = [layer.to(torch.bfloat16) for layer in layers]
    values = torch.stack(layers)[..., :num_tokens, :]  # [layer, kind, head, token, dim]
    num_layers, _, num_heads, _, head_dim = values.shape
    apart = values.reshape(num_layers, 2, num_heads, -1, BLOCK_TOKENS, head_dim)
    return apart.permute(3, 0, 1, 4, 2, 5).contiguous()


def _cache_of(blocks: Tensor, dtype: torch.dtype) -> DynamicCache:
    """The reverse, for a model that computes in `dtype`."""
    layers = blocks.to(dtype).permute(1, 2, 4, 0, 3, 5).flatten(3, 4)
    cache = DynamicCache()
    for number, (keys, values) in enumerate(layers):
        cache.update(keys[None].contiguous(), values[None].contiguous(), number)
    return cache


def read_text(reader: Reader, tokens: Sequence[int], continuation: Sequence[int]) -> None:
    """Add one prompt: what each codec predicts of its continuation, and its greedy answer."""
    caches, rest = reader.stored(tokens)
    following = torch.tensor([continuation], device=reader.device)
    raw_logs: Tensor | None = None
    raw_answer: list[int] = []
    for names, cache in reader.batches(caches):
        rows = len(names)
        first = reader.logits(rest.expand(rows, -1), cache)[:, -1:]
        more = reader.logits(following[:, :-1].expand(rows, -1), cache)
        cache.crop(1 - len(continuation))  # as it was before the continuation
        answers = reader.answer(first[:, 0], cache, ANSWER_TOKENS)
        logs = torch.cat((first, more), 1).log_softmax(-1)
        for name, log, answer in zip(names, logs, answers, strict=True):
            if raw_logs is None:
                raw_logs, raw_answer = log, answer
            quality = reader.qualities[name]
            chosen = log.gather(1, following[0, :, None]).double()
            quality.log_loss -= chosen.sum().item()
            quality.num_predicted += len(continuation)
            kl = (raw_logs.double().exp() * (raw_logs.double() - log.double())).sum(-1)
            quality.kl.append(kl.mean().item())
            quality.num_same_tokens.append(_num_same(raw_answer, answer))


def read_needle(reader: Reader, tokens: Sequence[int], fact: str, tokenizer: Any) -> None:
    caches, rest = reader.stored(tokens)
    for names, cache in reader.batches(caches):
        first = reader.logits(rest.expand(len(names), -1), cache)[:, -1]
        answers = reader.answer(first, cache, NEEDLE_ANSWER_TOKENS)
        for name, answer in zip(names, answers, strict=True):
            reader.qualities[name].found.append(fact in tokenizer.decode(answer))


def _num_same(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = enumerate(zip(left, right, strict=True))
    return next((place for place, (one, other) in pairs if one != other), len(left))


def open_codecs(
    names: Sequence[str], layout: KvLayout, device: str
) -> dict[str, tuple[Through, float]]:
    """Each codec's way through, and its packed bytes over the raw bytes. Raw is always first.

    Raw among `names` is computed once more.
    """
    found: dict[str, tuple[Through, float]] = {RAW: (_unchanged, 1.0)}
    for name in names:
        if name == LOSSLESS:
            form = fit_lossless([layout.num_bytes], layout.size("dim"))
            if form is None:
                raise SystemExit("codec lossless has no format for these heads: leave it out")
            found[name] = (_through_lossless(form, device), form.packed_bytes / form.raw_bytes)
        elif name == RAW:
            found[RAW_AGAIN] = (_unchanged, 1.0)
        else:
            codec = open_lossy(name, layout)

            def through(raw: Tensor, codec: Any = codec) -> tuple[Tensor, Tensor]:
                packed, fits = codec.pack_tensor(raw)
                return codec.unpack_tensor(packed), fits

            found[name] = (through, codec.packed_bytes / codec.raw_bytes)
    return found


def _unchanged(raw: Tensor) -> tuple[Tensor, Tensor]:
    return raw, torch.ones(len(raw), dtype=torch.bool, device=raw.device)


def _through_lossless(form: LosslessFormat, device: str) -> Through:
    if device == "cpu":
        codec = LosslessCodec(form)

        def on_cpu(raw: Tensor) -> tuple[Tensor, Tensor]:
            result = torch.empty_like(raw)
            fits = []
            packed = memoryview(bytearray(form.packed_bytes))
            for block, target in zip(raw, result, strict=True):
                fits.append(codec.pack(memoryview(block.numpy()), packed))
                codec.unpack(packed, memoryview(target.numpy()))
            return result, torch.tensor(fits, dtype=torch.bool)

        return on_cpu

    from penstock.codecs.lossless_triton import pack_blocks, unpack_blocks

    def on_gpu(raw: Tensor) -> tuple[Tensor, Tensor]:
        raw = raw.contiguous()
        result = torch.empty_like(raw)
        packed = torch.zeros(len(raw), form.packed_bytes, dtype=torch.uint8, device=raw.device)
        numbers = torch.arange(len(raw), device=raw.device)
        starts = torch.arange(form.num_regions, device=raw.device) * (form.region_values * 2)
        strides = torch.full_like(starts, form.raw_bytes)
        pack_blocks(form, starts + raw.data_ptr(), strides, numbers, packed)
        unpack_blocks(form, starts + result.data_ptr(), strides, numbers, packed)
        counts = packed[:, : 2 * form.num_regions].reshape(len(raw), -1, 2).int()
        totals = counts[..., 0] + (counts[..., 1] << 8)
        return result, (totals <= form.max_exceptions).all(1)

    return on_gpu


def table(qualities: Sequence[Quality]) -> str:
    """As Markdown, for docs/codecs.md."""
    raw = qualities[0]
    lines = [
        "| codec | of raw's bytes | perplexity | KL of the next token, mean (worst prompt) | "
        f"greedy answers equal | tokens until they differ, of {ANSWER_TOKENS} | needles found |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in qualities:
        change = each.perplexity / raw.perplexity - 1 if raw.num_predicted else math.nan
        perplexity = f"{each.perplexity:.4f}" + ("" if each is raw else f" ({change:+.2%})")
        kl = f"{each.mean_kl:.2g} ({max(each.kl, default=math.nan):.2g})"
        lines.append(
            f"| {each.codec} | {each.ratio:.3f} | {perplexity} | {kl} | "
            f"{each.num_equal} of {len(each.num_same_tokens)} | {each.mean_same_tokens:.1f} | "
            f"{sum(each.found)} of {len(each.found)} |"
        )
    return "\n".join(lines)


def has_lost(lossless: Quality, raw: Quality, again: Quality | None) -> str:
    """Why `lossless` is not as good as raw; empty if it is."""
    if lossless.num_changed:
        return "lossless changed KV: expected the same bits; this is a bug"
    if _is_like(lossless, raw):
        return ""
    if again is None or _is_like(again, raw):
        return (
            "lossless gave the same KV bit for bit, but not the same results: rows of a batch may "
            "be rounded differently; use --one-by-one, and raw among --codecs"
        )
    return ""  # this device does not compute the same twice


def _is_like(quality: Quality, raw: Quality) -> bool:
    """Whether not even a rounding differs."""
    return (
        quality.log_loss == raw.log_loss
        and not any(quality.kl)
        and quality.num_same_tokens == raw.num_same_tokens
        and quality.found == raw.found
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _embedded_model() -> str:
    """SmolLM2-135M from the installed package, unpacked once."""
    from penstock.engine import weights
    from penstock.engine.support import check_supported

    gguf = weights.embedded_gguf()
    return str(weights.gguf_folder(gguf, torch.bfloat16, check_supported, _say))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.codec_quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    num_needles = len(NEEDLE_TOKENS) * NEEDLES_PER_LENGTH
    parser.add_argument("--model", help="folder with weights; SmolLM2-135M if not given")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        help="in which the model computes; float32 by default where the device has no bfloat16. KV "
        "is stored in bfloat16 either way",
    )
    parser.add_argument("--prompts", type=int, default=200, help="texts to continue")
    parser.add_argument(
        "--max-tokens", type=int, help="leave out prompts that are longer, for a slow machine"
    )
    parser.add_argument("--needles", type=int, default=num_needles, help=f"at most {num_needles}")
    parser.add_argument("--codecs", default=",".join(CODECS), help="comma-separated")
    parser.add_argument(
        "--whole-tokens",
        type=int,
        default=0,
        help="keep this many tokens before the last full block's end as computed (in full blocks)",
    )
    parser.add_argument(
        "--one-by-one",
        action="store_true",
        help="compute each codec alone, not all in a batch (slower; always on a CPU)",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes that share the prompts, and the device"
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)  # of a job: I/N
    parser.add_argument("--json", action="store_true", help="JSON with each prompt's results")
    options = parser.parse_args()
    names = options.codecs.split(",")
    if unknown := set(names) - set(CODECS):
        parser.error(f"no such codec: {', '.join(sorted(unknown))}; expected {', '.join(CODECS)}")
    options.codecs = names
    options.dtype = getattr(torch, options.dtype or default_dtype(options.device))
    options.one_by_one |= options.device == "cpu"
    return options


def measure_in_jobs(num_jobs: int) -> tuple[dict[str, Any], list[Quality]]:
    """The sums of several processes, each with a part of the prompts."""
    command = [sys.executable, "-m", "benchmarks.codec_quality", *sys.argv[1:], "--json"]
    jobs = [
        subprocess.Popen([*command, "--part", f"{part}/{num_jobs}"], stdout=subprocess.PIPE)
        for part in range(num_jobs)
    ]
    answers = [json.loads(job.communicate()[0] or "null") for job in jobs]
    if None in answers:
        raise SystemExit("a job has failed, see above")
    about, results = {}, []
    for answer in answers:
        rows = answer.pop("results")
        about = about or answer
        for place, row in enumerate(rows):
            del row["perplexity"], row["mean_kl"]
            if place == len(results):
                results.append(Quality(row["codec"], row["ratio"]))
            for name in SUMMED:
                setattr(results[place], name, getattr(results[place], name) + row[name])
    return about, results


def main() -> None:
    options = _parse()
    if options.jobs > 1 and options.part is None:
        about, results = measure_in_jobs(options.jobs)
    else:
        about, results = measure(options)
    show(options, about, results)


@torch.inference_mode()
def measure(options: argparse.Namespace) -> tuple[dict[str, Any], list[Quality]]:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder = options.model or _embedded_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=options.dtype)
    model = model.to(options.device).eval()
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layout = KvLayout.of_engine(
        "bfloat16", config.num_hidden_layers, BLOCK_TOKENS, config.num_key_value_heads, head_dim
    )
    opened = open_codecs(options.codecs, layout, options.device)
    qualities = {name: Quality(name, ratio) for name, (_, ratio) in opened.items()}
    codecs = {name: through for name, (through, _) in opened.items()}
    reader = Reader(
        model=model,
        head=model.lm_head.weight.float(),
        codecs=codecs,
        whole_tokens=options.whole_tokens,
        one_by_one=options.one_by_one,
        qualities=qualities,
    )

    longest = options.max_tokens or config.max_position_embeddings
    prompts = [p for p in text_prompts(tokenizer, options.prompts) if len(p.tokens) <= longest]
    needles = [n for n in needle_prompts(tokenizer, options.needles) if len(n.tokens) <= longest]
    about = {
        "model": folder.rstrip("/").rsplit("/", 1)[-1],
        "device": torch.cuda.get_device_name() if options.device != "cpu" else "cpu",
        "dtype": str(options.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "num_prompts": len(prompts),
        "prompt_tokens": [len(prompt.tokens) for prompt in prompts],
        "needle_tokens": [len(needle.tokens) for needle in needles],
        "digest": digest([*prompts, *needles]),
        "whole_tokens": options.whole_tokens,
    }
    _say(f"{len(prompts)} prompts, {len(needles)} needles, digest {about['digest']}")

    started = said = time.monotonic()
    work: list[Callable[[], None]] = [
        *(lambda p=p: read_text(reader, p.tokens, p.continuation) for p in prompts),
        *(lambda n=n: read_needle(reader, n.tokens, n.fact, tokenizer) for n in needles),
    ]
    part, num_parts = map(int, (options.part or "0/1").split("/"))
    work = work[part::num_parts]
    for number, step in enumerate(work, 1):
        step()
        now = time.monotonic()
        if now - said > 10 or number == len(work):
            said = now
            kl = ", ".join(f"{each.codec} {each.mean_kl:.2g}" for each in qualities.values())
            _say(f"{number} of {len(work)}, {now - started:.0f} s; mean KL: {kl}")

    return about, list(qualities.values())


def show(options: argparse.Namespace, about: dict[str, Any], results: list[Quality]) -> None:
    for each in results:
        if each.num_not_kept:
            _say(f"{each.codec}: {each.num_not_kept} of {each.num_blocks} blocks did not fit")
    if options.json:
        rows = [
            {**asdict(each), "perplexity": each.perplexity, "mean_kl": each.mean_kl}
            for each in results
        ]
        print(json.dumps({**about, "results": rows}))
    else:
        lengths = about["prompt_tokens"]
        if lengths:
            print(
                f"{len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens and "
                f"{len(about['needle_tokens'])} needles; {about['model']}, computed in "
                f"{about['dtype']} with KV in bfloat16, {about['device']}, "
                f"torch {torch.__version__}, Python {about['python']}, digest {about['digest']}\n"
            )
        print(table(results))
    qualities = {each.codec: each for each in results}
    if options.part is None and LOSSLESS in qualities:
        why = has_lost(qualities[LOSSLESS], qualities[RAW], qualities.get(RAW_AGAIN))
        if why:
            _say(why)
            sys.exit(1)


if __name__ == "__main__":
    main()
