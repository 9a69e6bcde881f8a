"""Opens the CPU's part in attention to cold KV, if model and machine allow it, and measures it."""

from __future__ import annotations

import importlib.util
import logging
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.codecs.lossless_format import LosslessFormat
from penstock.engine.cold_split import ColdRates, ColdSplit
from penstock.engine.models import LoadedModel
from penstock.engine.table import PACKED_MARK
from penstock.machine import num_cores
from penstock.stores.host import HostArena
from penstock.types import round_up

if TYPE_CHECKING:
    from penstock.engine.cold_attention import ColdAttention
    from penstock.engine.cold_threads import ColdThreads

_cuda: Any = torch.cuda  # mostly untyped
log = logging.getLogger(__name__)

_SPARE_CORES = 2  # for the engine's thread and the server's
_MAX_THREADS = 32  # more than enough for the DRAM of one socket
_SAMPLE_BYTES = 512 << 20  # more than caches hold
_BESIDE_LINK = 0.85  # of the rate that the threads have alone, as measured on an H200's machine


def why_not(loaded: LoadedModel, kv_dtype: torch.dtype) -> str:
    """Why the CPU cannot attend to this model's KV; empty if it can."""
    config = loaded.model.config
    if kv_dtype not in (torch.bfloat16, torch.float32):
        return f"its KV is {str(kv_dtype).removeprefix('torch.')}, not bfloat16 or float32"
    if loaded.head_dim % 16:
        return f"its heads have {loaded.head_dim} dimensions, not a multiple of 16"
    for name in ("attn_logit_softcapping", "attn_logit_softcap"):
        if getattr(config, name, None):
            return "it caps the scores of attention"
    kinds = set(getattr(config, "layer_types", None) or ())
    has_windows = not kinds and getattr(config, "sliding_window", None)
    is_used = getattr(config, "use_sliding_window", True)
    if any(loaded.windows) or (is_used and (kinds - {"full_attention"} or has_windows)):
        return "it attends in windows"
    if any(name.endswith("sinks") for name, _ in loaded.model.named_parameters()):
        return "it has attention sinks"
    return ""


def open_cold_attention(
    mode: str,
    loaded: LoadedModel,
    kv_dtype: torch.dtype,
    block_tokens: int,
    host: HostArena,
    host_form: LosslessFormat | None,
    *,
    max_rows: int,
    span_blocks: int,
    part_tokens: int,
    device: torch.device,
    num_threads: int | None = None,
) -> ColdAttention | None:
    """None if the device must attend to everything; the log says why."""
    reason = why_not(loaded, kv_dtype)
    if importlib.util.find_spec("numba") is None:
        reason = "the package numba is not installed"
    if num_threads is None:
        num_threads = min(_MAX_THREADS, num_cores() - _SPARE_CORES)
    if not reason and num_threads < 1:
        reason = f"this process has {num_cores()} cores, and at least {_SPARE_CORES + 1} are needed"
    if reason:
        log.warning("the device attends to all cold KV of %s: %s", loaded.name, reason)
        return None
    try:
        return _open(
            mode,
            loaded,
            kv_dtype,
            block_tokens,
            host,
            host_form,
            max_rows=max_rows,
            span_blocks=span_blocks,
            part_tokens=part_tokens,
            device=device,
            num_threads=num_threads,
        )
    except Exception as error:  # for example, numba cannot compile it
        log.warning(
            "the device attends to all cold KV of %s: the processor's part did not start (%s)",
            loaded.name,
            error,
            exc_info=error,
        )
        return None


def _open(
    mode: str,
    loaded: LoadedModel,
    kv_dtype: torch.dtype,
    block_tokens: int,
    host: HostArena,
    host_form: LosslessFormat | None,
    *,
    max_rows: int,
    span_blocks: int,
    part_tokens: int,
    device: torch.device,
    num_threads: int,
) -> ColdAttention:
    # Only here: they import numba, which may be missing.
    from penstock.engine.cold_attention import MAX_TASKS, TASK_TOKENS, ColdAttention
    from penstock.engine.cold_threads import ColdShape, ColdThreads

    shape = ColdShape(
        loaded.num_layers,
        loaded.num_heads,
        loaded.num_kv_heads,
        loaded.head_dim,
        block_tokens,
        kv_dtype.itemsize,
    )
    spans_per_task = max(1, TASK_TOKENS // (span_blocks * block_tokens))
    max_spans = min(MAX_TASKS * spans_per_task, -(-host.num_slots // span_blocks))
    threads = ColdThreads(
        shape,
        max_rows,
        -(-max_spans // spans_per_task) + max_rows,
        max_spans * span_blocks,
        num_threads,
        host_form,
        pinned=device.type == "cuda",
    )
    split = ColdSplit(mode, span_blocks * shape.layer_bytes * shape.num_layers, max_spans)
    return ColdAttention(shape, split, threads, max_rows, span_blocks, part_tokens, device)


def measure_rates(
    threads: ColdThreads, form: LosslessFormat | None, step_seconds: float
) -> ColdRates | None:
    """Measure how fast the link and the threads are. `step_seconds`: of a step without cold KV.

    None if they could not be measured. Takes about a second.
    """
    try:
        return _measure(threads, form, step_seconds)
    except RuntimeError as error:  # above all: there is no memory left for the sample
        log.warning("the processor's part in attention to cold KV was not measured: %s", error)
        threads.cancel()
        return None


def _measure(
    threads: ColdThreads, form: LosslessFormat | None, step_seconds: float
) -> ColdRates | None:
    from penstock.engine.cold_threads import ColdTasks

    shape = threads.shape
    raw_bytes = shape.num_layers * shape.layer_bytes
    block_bytes = raw_bytes if form is None else round_up(form.packed_bytes, 512)
    num_blocks = min(max(1, _SAMPLE_BYTES // block_bytes), threads.max_blocks)
    sample = torch.empty(num_blocks * block_bytes, dtype=torch.uint8, pin_memory=True)
    sample.fill_(0)
    target = torch.empty(min(128 << 20, sample.numel()), dtype=torch.uint8, device="cuda")
    source = sample[: target.numel()]
    copies = []
    for _ in range(4):
        _cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        _cuda.synchronize()
        copies.append(time.perf_counter() - started)
    link = target.numel() / min(copies) * raw_bytes / block_bytes
    addresses = sample.data_ptr() + np.arange(num_blocks, dtype=np.int64) * block_bytes
    addresses += 0 if form is None else PACKED_MARK
    run = max(1, num_blocks // (4 * threads.num_threads))
    begins = np.arange(0, num_blocks, run)[: threads.max_tasks]
    ends = np.minimum(begins + run, num_blocks)
    tasks = np.stack([np.zeros_like(begins), begins, ends], axis=1)
    rates = []
    for _ in range(3):
        if not threads.is_ready():
            return None
        threads.open(ColdTasks(addresses, tasks))
        if not threads.ask_all():
            threads.cancel()
            return None
        rates.append(threads.bytes_per_second() or 0.0)
    if not max(rates):
        return None
    return ColdRates(link, max(rates) * _BESIDE_LINK, step_seconds)
