"""What a decode run says: one mapping for each system, with units in the names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from plora.sim.system.clock import PS_PER_MS, PS_PER_S, PS_PER_US
from plora.sim.system.config import Resolved
from plora.sim.system.decode import DecodeRun
from plora.sim.system.tasks import FABRIC, GPU, HOST


def spread_ms(times_ps: Any) -> dict[str, float]:
    """Return mean, extremes and percentiles of times in milliseconds."""
    ms = np.asarray(times_ps, dtype=np.float64) / PS_PER_MS
    percentiles = {f"p{p}": float(np.percentile(ms, p)) for p in (50, 90, 95, 99)}
    return {"mean": float(ms.mean()), "min": float(ms.min()), "max": float(ms.max()), **percentiles}


def _busy_shares(run: DecodeRun) -> dict[str, float]:
    """Return the share of time that each kind of resource was occupied; of several alike, the busiest and the mean."""
    total = float(sum(step.time_ps for step in run.played.values()))
    busy = {name: time / total for name, time in run.demand.busy_ps.items()}
    shares: dict[str, float] = {}
    for name, label in ((GPU, "gpu"), (HOST, "host"), (FABRIC, "gpu_fabric")):
        if name in busy:
            shares[label] = busy[name]
    for prefix, suffix, label in (("dev", "", "devices"), ("link", "down", "link_down"), ("link", "up", "link_up")):
        found = [share for name, share in busy.items() if name.startswith(prefix) and name.endswith(suffix)]
        if found:
            shares[f"{label}_max"] = max(found)
            shares[f"{label}_mean"] = sum(found) / len(found)
    moved = run.demand.moved_bytes.get(GPU, 0) * run.machine.times.gpu.hbm_gb_per_s**-1 * 1e-9
    shares["hbm_bandwidth"] = moved / (total / PS_PER_S)
    return shares


def system_result(run: DecodeRun) -> dict[str, Any]:
    """Return the results of one system."""
    steps, played = len(run.step_ps), len(run.played)
    total_s = float(run.step_ps.sum()) / PS_PER_S
    demand = run.demand
    limits = sum(demand.limit_ps.values())
    return {
        "system": run.spec.name,
        "title": run.spec.title,
        "tpot_ms": spread_ms(run.step_ps),
        "throughput_tokens_per_s": run.running * steps / total_s,
        "bound_by": max(demand.limit_ps, key=lambda name: (demand.limit_ps[name], name)),
        "bound_share": _ordered({name: time / limits for name, time in demand.limit_ps.items()}),
        "layer_phases": _phases(run),
        "busy_share": _busy_shares(run),
        "step_part_ms": {name: time / PS_PER_MS / played for name, time in demand.part_ps.items() if time},
        "moved_bytes_per_step": {name: moved // played for name, moved in sorted(demand.moved_bytes.items())},
        "steps": {"timed": steps, "played_as_events": played},
        "batch": {"requested": run.requested, "running": run.running},
        "context_tokens_mean": float(run.batch.contexts.mean() + (steps - 1) / 2),
        "adapters_in_batch": len(run.serving),
        "strategies": run.strategy_counts(),
        "kv_share_in_hbm": run.kv_share,
        "hbm_bytes": {
            "budget": run.hbm.budget,
            "weights": run.hbm.weights,
            "adapters": run.hbm.adapters,
            "kv_cache": run.hbm.kv,
        },
        "fits_in_hbm": run.hbm.fits,
        "gpus": run.machine.gpus,
        "far_bytes": {"capacity": run.machine.far_capacity_bytes * run.machine.gpus, "used": run.far_bytes},
        "link": {"name": run.machine.link_name if run.machine.has_far else None, "sharing": run.machine.link_sharing},
    }


def _phases(run: DecodeRun) -> list[dict[str, Any]]:
    """Return every phase of every kind of layer: its time in one layer, and what bounded it.

    Empty where phases overlap or have no order (sub-batches, the closed forms).
    """
    kinds, steps = run.setting.work.kinds, len(run.played)
    phases: dict[tuple[int, str], dict[str, int]] = {}
    for (kind, name, limit), time in run.demand.phase_ps.items():
        phases.setdefault((kind, name), {})[limit] = time
    order = {(n, g.name): i for n, kind in enumerate(kinds) for i, g in enumerate([*kind.before, *kind.after])}
    found = []
    for (kind, name), limits in sorted(
        phases.items(), key=lambda item: (item[0][0] % (len(kinds) + 1), order.get(item[0], 0.5))
    ):
        layers, total = kinds[kind].count if kind >= 0 else 1, sum(limits.values())
        shares = _ordered({limit: time / total for limit, time in limits.items()}) if total else {}
        found.append(
            {
                "layers": layers,
                "window": kinds[kind].window if kind >= 0 else None,
                "phase": name,
                "time_us": total / PS_PER_US / steps / layers,
                "bound_by": next(iter(shares), "nothing"),
                "bound_share": shares,
            }
        )
    return found


def _ordered(shares: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(shares.items(), key=lambda item: (-item[1], item[0])))


def config_of(resolved: Resolved) -> dict[str, Any]:
    """Return the resolved configuration of a run: every number that went into it."""
    options, gpu, device, link = resolved.options, resolved.gpu, resolved.device, resolved.link
    workload = resolved.source.workload
    return {
        "model": options.model,
        "workload": options.workload,
        "workload_origin": resolved.source.origin,
        "workload_tags": workload.tags if workload else {},
        "systems": list(options.systems),
        "batch_size": resolved.batch_size,
        "num_adapters": resolved.source.adapters,
        "context_tokens": options.context_tokens,
        "steps": options.steps,
        "composition": options.composition,
        "preset": resolved.preset,
        "link_sharing": options.link_sharing,
        "kv_cache_dtype": options.kv_cache_dtype,
        "tensor_parallel_size": options.tensor_parallel_size,
        "adapter_wave": options.adapter_wave,
        "sub_batches": options.sub_batches,
        "lora_scope": options.lora_scope,
        "adapter_shape": options.adapter_shape,
        "experts": options.experts,
        "weights": resolved.work.weights or resolved.model.weights,
        "num_devices": options.num_devices,
        "seed": options.seed,
        "gpu": {
            "name": gpu.name,
            "hbm_gb_per_s": gpu.hbm_gb_per_s,
            "hbm_bytes": gpu.hbm_bytes,
            "reserve_bytes": gpu.reserve_bytes,
            "fp16_tflops": gpu.fp16_tflops,
            "kernel_launch_ns": gpu.kernel_launch_ns,
        },
        "device": {
            "name": device.name,
            "dram_gb_per_s": device.dram_gb_per_s,
            "capacity_bytes": device.capacity_bytes,
            "ndp_tflops": device.ndp_tflops,
        },
        "link": {"name": link.name, "gb_per_s": link.gb_per_s, "one_way_latency_ns": link.one_way_latency_ns},
        "costs": resolved.costs.resolved(),
        "system_specs": {spec.name: msgspec.to_builtins(spec) for spec in resolved.systems},
    }


def steps_csv(runs: list[DecodeRun]) -> str:
    """Return one line for every step of every system; `bound_by` only where a step was played in full."""
    lines = ["system,step,step_ms,context_tokens_mean,bound_by"]
    for run in runs:
        mean = float(run.batch.contexts.mean())
        for number, time in enumerate(run.step_ps.tolist()):
            bound = run.played[number].bound_by if number in run.played else ""
            lines.append(f"{run.spec.name},{number},{time / PS_PER_MS:.9f},{mean + number:.3f},{bound}")
    return "\n".join(lines) + "\n"
