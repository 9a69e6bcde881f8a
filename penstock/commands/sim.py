"""`penstock sim`: how tiers of given sizes would have served given traffic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.codecs.names import AUTO
from penstock.commands import JsonFlag, print_json, progress_bar
from penstock.config import Config
from penstock.errors import ConfigError
from penstock.install import require
from penstock.machine import num_cores

if TYPE_CHECKING:
    from penstock.sim.trace import Trace

EXAMPLE = (
    "Example: penstock sim trace.jsonl --device-gib 40 --host-gib 64,256 --disk-gib 1000 "
    "--policy lru,s3fifo\n\n"
    "Example: penstock sim --generate chat --device-gib 20 --host-gib 64 --sweep --plot o.html\n\n"
    "Example: penstock sim trace.jsonl --host-blocks 1000,4000,16000 --json\n\n"
    "Example: penstock sim --generate chat --host-gib 64 --window 1024 --window-groups 5\n\n"
    "Example: penstock sim trace.jsonl --device-gib 40 --host-gib 512 --instances 64 "
    "--instances-per-node 8 --router sticky,cache-aware"
)


def sim(
    traces: Annotated[
        list[Path] | None,
        typer.Argument(metavar="TRACE", help="Recorded traffic; the format is detected."),
    ] = None,
    generate: Annotated[
        str | None,
        typer.Option(
            metavar="WORKLOAD",
            help="Generate traffic instead: chat, rag, code, agents or batch.",
        ),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, metavar="N", help="Requests to generate.")] = 2000,
    seed: Annotated[int, typer.Option(metavar="N", help="Random seed for --generate.")] = 0,
    format: Annotated[
        str | None, typer.Option(metavar="NAME", help="The trace's format, if it is not detected.")
    ] = None,
    block_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Tokens per block, if the trace does not fix it."),
    ] = None,
    device_gib: Annotated[
        str | None,
        typer.Option(
            metavar="GIB[,…]",
            help="Memory for KV on the GPU. Without it, only hit rates of one tier are simulated.",
        ),
    ] = None,
    host_gib: Annotated[str | None, typer.Option(metavar="GIB[,…]", help="DRAM size.")] = None,
    disk_gib: Annotated[str | None, typer.Option(metavar="GIB[,…]", help="Disk size.")] = None,
    device_blocks: Annotated[
        str | None, typer.Option(metavar="N[,…]", help="Like --device-gib, in blocks.")
    ] = None,
    host_blocks: Annotated[
        str | None, typer.Option(metavar="N[,…]", help="Like --host-gib, in blocks.")
    ] = None,
    disk_blocks: Annotated[
        str | None, typer.Option(metavar="N[,…]", help="Like --disk-gib, in blocks.")
    ] = None,
    sweep: Annotated[
        bool,
        typer.Option("--sweep", help="Also simulate 1/4, 1/2, 2 and 4 times the DRAM."),
    ] = False,
    policy: Annotated[
        str, typer.Option(metavar="NAME[,…]", help="Eviction policies to compare.")
    ] = Config().host.policy,
    model: Annotated[
        str,
        typer.Option(metavar="MODEL", help="A known model, a config.json, or its folder."),
    ] = "llama-3.1-8b",
    window: Annotated[
        int | None,
        typer.Option(
            min=2,
            metavar="TOKENS",
            help="Replay hit rates of a model with sliding windows of this size.",
        ),
    ] = None,
    window_groups: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="With --window: groups of windows for each group of full attention.",
        ),
    ] = 5,
    state_groups: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Groups of states, such as Mamba's, for each group of full attention.",
        ),
    ] = 0,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="TOKENS",
            help="Consider a checkpoint of windows and states every so many tokens.",
        ),
    ] = None,
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
    gpu: Annotated[str, typer.Option(metavar="GPU", help="A known GPU; sets the rates.")] = "h200",
    gpus: Annotated[int, typer.Option(min=1, metavar="N", help="GPUs per instance.")] = 1,
    prefill_tokens_per_second: Annotated[
        float | None,
        typer.Option(metavar="RATE", help="Your prefill rate. Default: from the GPU."),
    ] = None,
    host_link_gb_per_second: Annotated[
        float | None, typer.Option(metavar="GB/S", help="Rate between GPU and DRAM, per direction.")
    ] = None,
    disk_load_gb_per_second: Annotated[
        float | None, typer.Option(metavar="GB/S", help="Read rate of the disk.")
    ] = None,
    disk_save_gb_per_second: Annotated[
        float | None, typer.Option(metavar="GB/S", help="Write rate of the disk.")
    ] = None,
    speed: Annotated[
        float, typer.Option(metavar="X", help="Speed-up over the recorded trace.")
    ] = 1.0,
    max_batched_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Maximum tokens per step.")
    ] = 8192,
    max_running: Annotated[int, typer.Option(min=1, metavar="N", help="Sequences at once.")] = 64,
    max_waiting: Annotated[
        int, typer.Option(min=1, metavar="N", help="Queue length; more requests are rejected.")
    ] = 256,
    instances: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Simulate a fleet of N instances, each with its own device pool."
        ),
    ] = None,
    instances_per_node: Annotated[
        int,
        typer.Option(metavar="K", help="Instances that share one node's DRAM and disk."),
    ] = 1,
    router: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[,…]",
            help="How requests are sent to instances: round-robin, sticky (by session) or "
            "cache-aware (as vllm-router does). Default: compare all.",
        ),
    ] = None,
    roles: Annotated[
        str | None,
        typer.Option(
            metavar="prefill=P,decode=D",
            help="Compute prompts and answers on different instances, and compare with a fleet "
            "in which every instance does both.",
        ),
    ] = None,
    remote_gib: Annotated[
        float | None,
        typer.Option(metavar="GIB", help="Size of a remote store that all nodes share."),
    ] = None,
    remote_blocks: Annotated[
        int | None, typer.Option(metavar="N", help="Like --remote-gib, in blocks.")
    ] = None,
    remote_gb_per_second: Annotated[
        float | None,
        typer.Option(
            metavar="GB/S",
            help="Rate between a node and the remote store, per direction. Default: 10.",
        ),
    ] = None,
    clients: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Ignore the trace's times: N clients send its requests in order, each when it has "
            "its last answer.",
        ),
    ] = None,
    cache_threshold: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="cache-aware: the share of a prompt that an instance must have been sent before.",
        ),
    ] = 0.3,
    balance_abs_threshold: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="cache-aware: ignore prefixes if loads differ by more than this many requests...",
        ),
    ] = 64,
    balance_rel_threshold: Annotated[
        float, typer.Option(metavar="X", help="...and by more than this factor.")
    ] = 1.5,
    jobs: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Processes. Default: one per core.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write charts to this HTML file.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Simulate how tiers of given sizes would have served recorded or generated traffic.

    Runs the same bookkeeping, policies and decisions as a server; only links, computing and the
    clock are simulated. Separate several sizes or policies with commas to compare them. The results
    also show two limits: the offline optimum, which knows the future and which no policy beats, and
    an unbounded cache. A trace with segments that may be reused anywhere (docs/anywhere.md) is also
    simulated without its marks. With --instances, a router sends the requests to several instances.
    """
    from penstock.commands.sim_fleet import (
        FleetOptions,
        draw_fleets,
        simulate_fleets,
        write_fleet_plot,
    )
    from penstock.commands.sim_tables import draw, write_plot
    from penstock.sim.report import facts
    from penstock.sim.routers import CacheAwareRules
    from penstock.sim.settings import Room, SimulatedHardware, plan_points
    from penstock.sim.sweep import sweep as run_sweep

    room = Room.read(
        {"device": device_gib, "host": host_gib, "disk": disk_gib},
        {"device": device_blocks, "host": host_blocks, "disk": disk_blocks},
        with_sweep=sweep,
    )
    hardware = SimulatedHardware(
        model,
        gpu,
        num_gpus=gpus,
        prefill_tokens_per_second=prefill_tokens_per_second,
        host_gb_per_second=host_link_gb_per_second,
        disk_load_gb_per_second=disk_load_gb_per_second,
        disk_save_gb_per_second=disk_save_gb_per_second,
        max_batched_tokens=max_batched_tokens,
        max_num_seqs=max_running,
        max_waiting=max_waiting,
        host_codec=host_codec,
        disk_codec=disk_codec,
    )
    fleet = FleetOptions.read(
        instances,
        instances_per_node,
        router,
        roles,
        rules=CacheAwareRules(cache_threshold, balance_abs_threshold, balance_rel_threshold),
        clients=clients,
        remote_gib=remote_gib,
        remote_blocks=remote_blocks,
        remote_gb_per_second=remote_gb_per_second,
    )
    if fleet is not None and (window is not None or state_groups):
        raise ConfigError(
            "--instances is given with --window or --state-groups, which are replayed without "
            "time for one instance: leave out one of them"
        )
    if window is not None or state_groups:
        if room.is_timed or plot is not None:
            raise ConfigError(
                "--window and --state-groups are replayed without time and drawn in a table: give "
                "--host-gib or --host-blocks, and neither a device pool nor --plot"
            )
    elif checkpoint_every is not None:
        raise ConfigError(
            "--checkpoint-every is given, but the model has full attention alone, which needs no "
            "checkpoints: add --window or --state-groups"
        )
    if plot is not None and not plot.absolute().parent.is_dir():
        raise ConfigError(f"--plot {plot}: its folder does not exist; create it or choose another")
    policies = [name.strip() for name in policy.split(",")]
    # Check all arguments before reading or simulating anything.
    hardware.check(policies, speed)
    if fleet is not None:
        fleet.check(room, hardware)
    found = _traces(traces or [], generate, requests, seed, format, block_tokens)
    if any(trace.has_segments for trace in found):
        require("probe", ["numpy"], "a trace with segments")
        # Beside a trace with segments, the same without marks.
        found = [same for trace in found for same in _with_and_without(trace)]
    if window is not None or state_groups:
        from penstock.commands.sim_groups import draw_groups, replay_all

        with progress_bar() as tick:
            told = replay_all(
                found,
                room,
                policies,
                hardware,
                window=window,
                num_windows=window_groups,
                num_states=state_groups,
                every_tokens=checkpoint_every,
                tick=tick,
            )
        if as_json:
            print_json(told)
        else:
            draw_groups(told)
        return
    common = hardware.facts(is_timed=room.is_timed, block_tokens=found[0].block_tokens)
    if fleet is not None:
        with progress_bar() as tick:
            simulated, sizes = simulate_fleets(
                found,
                room,
                policies,
                hardware,
                fleet,
                speed=speed,
                num_processes=jobs or num_cores(),
                tick=tick,
            )
        results = common | {"unit": room.unit} | simulated
        if plot is not None:
            write_fleet_plot(plot, results, sizes, room.unit)
        if as_json:
            print_json(results)
        else:
            draw_fleets(results, sizes, room.unit)
        return
    points, sizes = plan_points(found, room, policies, hardware, speed)
    with progress_bar() as tick:
        swept = run_sweep(found, points, num_processes=jobs or num_cores(), tick=tick)
    results = common | {"unit": room.unit} | facts(found, swept)
    if plot is not None:
        write_plot(plot, results, sizes, room.unit)
    if as_json:
        print_json(results)
    else:
        draw(results, sizes, room.unit)


def _with_and_without(trace: Trace) -> list[Trace]:
    if not trace.has_segments:
        return [trace]
    return [trace, replace(trace.without_marks(), name=f"{trace.name} without marks")]


def _traces(
    paths: list[Path],
    workload: str | None,
    num_requests: int,
    seed: int,
    format: str | None,
    block_tokens: int | None,
) -> list[Trace]:
    from penstock.sim.formats import read_trace
    from penstock.sim.workloads import generate

    either = "expected trace files, or --generate with a workload"
    if workload is not None and paths:
        raise ConfigError(f"both {paths[0]} and --generate {workload} are given: {either}")
    if workload is None and not paths:
        raise ConfigError(f"no traffic is given: {either}")
    if workload is None:
        return [read_trace(path, format=format, block_tokens=block_tokens) for path in paths]
    if block_tokens is None:
        return [generate(workload, num_requests=num_requests, seed=seed)]
    return [generate(workload, num_requests=num_requests, seed=seed, block_tokens=block_tokens)]
