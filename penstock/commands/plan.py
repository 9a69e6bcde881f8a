"""`penstock plan`: whether offloading helps, how much memory it needs, and the settings."""

from __future__ import annotations

import json
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.codecs.names import AUTO
from penstock.commands import JsonFlag, print_json
from penstock.commands.kv_size import check_counts
from penstock.errors import ConfigError
from penstock.units import GiB

if TYPE_CHECKING:
    from penstock.plan.fit import Demand, Hardware
    from penstock.plan.planner import PlannedModel
    from penstock.plan.reuse import ReuseStats
    from penstock.shapes.gpu_rates import GpuRates, RatesOf

EXAMPLE = (
    "Example: penstock plan llama-3.1-8b --context 32768 --sessions 64 --gpu h200 "
    "--host-gib 512\n\n"
    "Example: penstock plan llama-3.1-70b --context 28000 --sessions 120 --active 30 "
    "--shared-prefix-tokens 3800 --gpu a100-80gb --gpus 8 --max-token-ms 100\n\n"
    "Example: penstock plan --list"
)
_MAX_GIB = 1 << 33  # larger than any real value, and no product overflows a float
_MAX_GPUS = 1024


class KvDtype(StrEnum):
    AUTO = "auto"
    FP8 = "fp8"


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A known model (short or Hugging Face name), a config.json, or its folder.",
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Tokens per session, with answers. Default: P90 of the --trace."
        ),
    ] = None,
    sessions: Annotated[
        int | None, typer.Option(metavar="N", help="Sessions open at once.")
    ] = None,
    active: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Sessions that decode at once. Default: a quarter; the rest wait for their users.",
        ),
    ] = None,
    shared_prefix_tokens: Annotated[
        int, typer.Option(metavar="N", help="Length of the prefix that all sessions share.")
    ] = 0,
    turns: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Turns per session. DRAM keeps a checkpoint of windows and states for each.",
        ),
    ] = 1,
    reuse: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Share of prompt tokens computed before, 0 to 1."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Your requests, in a format `penstock sim` reads."),
    ] = None,
    max_token_ms: Annotated[
        float | None,
        typer.Option(
            metavar="MS", help="Maximum time per token. Default: 200 is assumed acceptable."
        ),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="A known GPU; see --list.")
    ] = None,
    gpus: Annotated[
        int,
        typer.Option(metavar="N", help="Number of GPUs. The plan says how to divide them."),
    ] = 1,
    tensor_parallel_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="GPUs per copy of the model; the rest hold more copies. Default: the best choice.",
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of each GPU's memory for weights and KV.")
    ] = 0.9,
    device_kv_gib: Annotated[
        float | None,
        typer.Option(metavar="GiB", help="Memory for KV on all GPUs, as reported by your engine."),
    ] = None,
    host_gib: Annotated[
        float | None,
        typer.Option(metavar="GiB", help="DRAM available for KV. Default: the plan sizes it."),
    ] = None,
    disk_gib: Annotated[
        float | None, typer.Option(metavar="GiB", help="Disk space available for KV.")
    ] = None,
    kv_cache_dtype: Annotated[
        KvDtype, typer.Option(help="fp8 rounds KV to 8 bits, which halves its size.")
    ] = KvDtype.AUTO,
    host_codec: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How DRAM packs KV: raw, lossless (bfloat16 only), or lossy: fp8, int8, int4. "
            "auto: lossless for bfloat16, raw otherwise.",
        ),
    ] = AUTO,
    disk_codec: Annotated[
        str, typer.Option(metavar="NAME", help="The same for the disk. auto: as DRAM.")
    ] = AUTO,
    remote_codec: Annotated[
        str, typer.Option(metavar="NAME", help="The same for a shared store. auto: as DRAM.")
    ] = AUTO,
    weights_gib: Annotated[
        float | None,
        typer.Option(metavar="GiB", help="Weights. Default: known, or 2 bytes per parameter."),
    ] = None,
    probe: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Output of `penstock probe --json`, for disk and remote rates."
        ),
    ] = None,
    prefill_tokens_per_second: Annotated[
        float | None,
        typer.Option(
            metavar="RATE", help="Measured prefill rate of one server. Default: estimated."
        ),
    ] = None,
    list_known: Annotated[
        bool, typer.Option("--list", help="List the known models and GPUs, with their sources.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Whether offloading helps, how much memory it needs, and the settings to use.

    Everything is calculated, nothing is measured: sizes come from the model's shape, rates from the
    vendor's data sheet times the share that one H200 reached, or from --probe.
    """
    from penstock.commands import catalog_report, plan_report
    from penstock.plan.fit import Demand, default_active
    from penstock.plan.planner import make_plan

    if list_known:
        catalog_report.show_catalog(as_json=as_json)
        return
    if model is None or gpu is None:
        raise ConfigError(
            f"{'MODEL' if model is None else '--gpu'} is missing: expected one of those that "
            "`penstock plan --list` lists, or a model's config.json"
        )
    if sessions is None:
        raise ConfigError("--sessions is missing: expected the number of sessions open at once")
    check_counts(
        {"--context": context, "--sessions": sessions, "--turns": turns, "--active": active}
    )
    if not 1 <= gpus <= _MAX_GPUS:
        raise ConfigError(f"--gpus is {gpus}: expected a whole number from 1 to {_MAX_GPUS}")
    if tensor_parallel_size is not None and not 1 <= tensor_parallel_size <= gpus:
        raise ConfigError(
            f"--tensor-parallel-size is {tensor_parallel_size}: expected 1 to {gpus} (--gpus)"
        )
    _check_range("--max-token-ms", max_token_ms, 1e9, "milliseconds")
    _check_range("--prefill-tokens-per-second", prefill_tokens_per_second, 1e12, "tokens/s")
    _check_range("--gpu-memory-utilization", gpu_memory_utilization, 1, "as a share")
    if reuse is not None and not 0 <= reuse <= 1:
        raise ConfigError(f"--reuse is {reuse}: expected a share from 0 to 1")
    if reuse is not None and trace is not None:
        raise ConfigError("both --reuse and --trace are given: expected one; leave out the other")
    hardware = replace(
        _hardware(gpu, gpus, gpu_memory_utilization, host_gib, disk_gib, device_kv_gib),
        tensor_parallel=tensor_parallel_size,
        host_codec=host_codec,
        disk_codec=disk_codec,
        remote_codec=remote_codec,
    )
    planned = _model(model, weights_gib, kv_cache_dtype)
    found = None if trace is None else _analyse(trace)
    if context is None:
        if found is None:
            raise ConfigError("--context is missing: expected tokens per session, or a --trace")
        context = found.p90_tokens
    is_active_assumed = active is None
    active = default_active(sessions) if active is None else active
    _check_demand(context, sessions, active, shared_prefix_tokens)
    demand = Demand(
        context_tokens=context,
        num_sessions=sessions,
        num_active=active,
        shared_tokens=shared_prefix_tokens,
        num_turns=turns,
        reuse_share=reuse,
        max_token_seconds=None if max_token_ms is None else max_token_ms / 1e3,
    )
    if found is not None:
        demand = _with_trace(demand, planned, found)
    rates_of = _rates_of(planned, hardware, probe, prefill_tokens_per_second)
    made = make_plan(planned, hardware, demand, rates_of)
    if as_json:
        print_json(plan_report.as_data(made, found, is_active_assumed=is_active_assumed))
    else:
        plan_report.draw(made, found, is_active_assumed=is_active_assumed)


def _check_demand(context: int, sessions: int, active: int, shared: int) -> None:
    if active > sessions:
        raise ConfigError(f"--active is {active}: expected at most {sessions} (--sessions)")
    if not 0 <= shared < context:
        raise ConfigError(
            f"--shared-prefix-tokens is {shared}: expected 0 or more, and less than the "
            f"{context} tokens of a session"
        )


def _check_range(name: str, value: float | None, most: float, unit: str) -> None:
    if value is not None and not 0 < value <= most:
        raise ConfigError(f"{name} is {value:g}: expected more than 0 and up to {most:g} {unit}")


def _hardware(
    gpu: str,
    gpus: int,
    utilization: float,
    host_gib: float | None,
    disk_gib: float | None,
    device_kv_gib: float | None,
) -> Hardware:
    from penstock.plan.fit import Hardware
    from penstock.shapes.catalog import find_gpu

    sizes = {"--host-gib": host_gib, "--disk-gib": disk_gib, "--device-kv-gib": device_kv_gib}
    for name, size in sizes.items():
        _check_range(name, size, _MAX_GIB, "GiB; or leave it out")
    return Hardware(
        find_gpu(gpu),
        gpus,
        utilization,
        None if host_gib is None else int(host_gib * GiB),
        int((disk_gib or 0) * GiB),
        None if device_kv_gib is None else int(device_kv_gib * GiB),
    )


def _model(name: str, weights_gib: float | None, dtype: KvDtype) -> PlannedModel:
    from penstock.config.options import EMBEDDED
    from penstock.plan.planner import PlannedModel
    from penstock.shapes.catalog import find_model
    from penstock.shapes.sizing import find_shape

    _check_range("--weights-gib", weights_gib, _MAX_GIB, "GiB")
    known = find_model(name)
    shape = find_shape(name) if known is None else known.shape
    weight_bytes = None if known is None else known.weight_bytes
    if weight_bytes is None and shape.num_params is not None:
        weight_bytes = 2 * shape.num_params
    if weights_gib is not None:
        weight_bytes = int(weights_gib * GiB)
    if weight_bytes is None:
        raise ConfigError(
            f"the size of the weights of {name} is unknown: expected vocab_size and "
            "intermediate_size in its config.json; add them, or give --weights-gib"
        )
    if dtype is KvDtype.FP8:
        shape = replace(shape, bits=8)
    served = name
    if known is not None:
        served = EMBEDDED if known.name == EMBEDDED else known.repo
    elif name.endswith("config.json"):
        served = str(Path(name).parent)
    return PlannedModel(known.name if known else name, served, shape, weight_bytes)


def _analyse(path: Path) -> ReuseStats:
    from penstock.plan.reuse import analyse
    from penstock.sim.formats import read_trace

    return analyse(read_trace(path))


def _with_trace(demand: Demand, model: PlannedModel, found: ReuseStats) -> Demand:
    per_block = model.shape.full_bytes_per_token * found.block_tokens
    live_bytes = found.num_live_blocks * per_block
    return replace(demand, reuse_share=found.reuse_share, live_bytes=live_bytes)


def _rates_of(
    model: PlannedModel, hardware: Hardware, probe: Path | None, tokens_per_second: float | None
) -> RatesOf:
    from penstock.shapes.gpu_rates import rates_from_table, with_prefill, with_probe

    probed = None if probe is None else _read_probe(probe)

    def rates_of(num_gpus: int) -> GpuRates:
        rates = rates_from_table(hardware.gpu, num_gpus, model.shape)
        if probed is not None:
            rates = with_probe(rates, probed, model.shape.bytes_per_token)
        if tokens_per_second is not None:
            rates = with_prefill(rates, tokens_per_second)
        return rates

    return rates_of


def _read_probe(path: Path) -> Any:
    expected = "expected the output of `penstock probe --json`"
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"--probe {path} cannot be read ({error.strerror}): {expected}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"--probe {path} is not JSON: {expected}") from None
