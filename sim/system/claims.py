"""The paper's whole-system figures beside this simulator's, as a table.

    python -m plora.sim.system.claims

A report, not a calibration: nothing in the simulator was set to meet these figures. Workloads whose
lengths were solved from a figure (docs/models.md, "Workloads") can only agree with that figure by
construction; such rows say so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from plora.sim.system.clock import PS_PER_MS
from plora.sim.system.config import RunOptions, resolve
from plora.sim.system.decode import DecodeRun, decode_run

LADDER = (8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 450.0, 900.0, 1800.0)
"""Link rates of the paper's sweep in GB/s (section VIII)."""

POOL = (1, 2, 4, 8, 16, 32, 64)

OVERLAP = {"composition": "overlap"}
ADDITIVE = {"composition": "additive", "link_sharing": "per-device"}


def run_of(system: str, **choices: Any) -> DecodeRun:
    """Return one step of `system` in the middle of its workload's decode."""
    resolved = resolve(RunOptions(systems=(system,), **{"steps": 1, **choices}))
    return decode_run(resolved, resolved.systems[0])


def step_ms(system: str, **choices: Any) -> float:
    """Return the length of that step."""
    return run_of(system, **choices).played[0].time_ps / PS_PER_MS


def tokens_per_s(system: str, **choices: Any) -> float:
    """Return its throughput."""
    run = run_of(system, **choices)
    return run.running / run.played[0].time_ps * 1e12


def _at(rate: float, **choices: Any) -> dict[str, Any]:
    return {**choices, "link_numbers": {"gb_per_s": rate}}


def _floors() -> Sequence[float]:
    return [step_ms("plora", model=m, **OVERLAP) for m in ("llama2-7b", "llama3-8b", "llama2-13b")]


def _plateau() -> Sequence[float]:
    choices = {"workload": "uniform-long", **OVERLAP}
    return [tokens_per_s("plora", model=m, **choices) for m in ("llama2-7b", "llama2-13b")]


def saturating_link(**choices: Any) -> float:
    """Return the least rate of the ladder that gives 99 % of the throughput at its end."""
    curve = [tokens_per_s("plora", **_at(rate, **choices)) for rate in LADDER]
    return next(rate for rate, tokens in zip(LADDER, curve, strict=True) if tokens >= 0.99 * curve[-1])


def _saturation() -> Sequence[float]:
    return [
        saturating_link(model=model, workload=workload, **OVERLAP)
        for workload in ("uniform", "uniform-long")
        for model in ("llama2-7b", "llama2-13b")
    ]


PODS = (("llama3.1-70b", 4), ("llama3.1-405b", 16), (str(Path(__file__).parent / "data" / "dense-1.2t.json"), 64))
"""Models beyond one GPU, and the GPUs that share each (section VIII, finding 5)."""

LONG = {"workload": "uniform-long", "num_adapters": 500}
"""1000 adapters of the largest model, half of every matrix replicated, exceed the 2 TB of a GPU's pool."""


def _pods(wave: str) -> Callable[[], Sequence[float]]:
    def links() -> Sequence[float]:
        found = []
        for model, gpus in PODS:
            choices = {"model": model, "tensor_parallel_size": gpus, "adapter_wave": wave, **LONG}
            found.append(saturating_link(**choices, **OVERLAP))
        return found

    return links


def _pod_floors() -> Sequence[float]:
    return [step_ms("plora", model=m, tensor_parallel_size=n, **_at(1800.0, **OVERLAP)) for m, n in PODS]


def _gain_above_128() -> Sequence[float]:
    found = []
    for workload in ("uniform", "uniform-long"):
        low, high = (tokens_per_s("plora", **_at(r, workload=workload, **OVERLAP)) for r in (128.0, 1800.0))
        found.append(100 * (high / low - 1))
    return found


def _nocxl() -> Sequence[float]:
    found = [
        tokens_per_s("plora-nocxl", model=m, workload=w, **OVERLAP)
        for m in ("llama2-7b", "llama2-13b")
        for w in ("uniform", "uniform-long")
    ]
    return [min(found), max(found)]


def _over_nocxl() -> Sequence[float]:
    found = []
    for model in ("llama2-7b", "llama2-13b"):
        for workload in ("uniform", "uniform-long"):
            for rate in LADDER:
                choices = _at(rate, model=model, workload=workload, **OVERLAP)
                found.append(step_ms("plora-nocxl", **choices) / step_ms("plora", **choices))
    return [min(found), max(found)]


def _over_nocxl_by_kv() -> Sequence[float]:
    found = []
    for dtype in ("fp16", "int8", "int4"):
        choices = {"model": "llama2-13b", "workload": "uniform-long", "kv_cache_dtype": dtype, **OVERLAP}
        found.append(step_ms("plora-nocxl", **choices) / step_ms("plora", **choices))
    return found


def _cpu() -> Sequence[float]:
    return [tokens_per_s("cpu-lora-offload", **OVERLAP)]


def _grace_hopper_lmsys() -> Sequence[float]:
    found = [
        step_ms("grace-hopper", model=m, workload="lmsys", **OVERLAP)
        / step_ms("plora", model=m, workload="lmsys", **OVERLAP)
        for m in ("llama3-8b", "llama2-13b", "llama2-7b")
    ]
    return [min(found), max(found)]


def _grace_hopper_long() -> Sequence[float]:
    # 1000 adapters and the KV cache exceed the 480 GB of the host: 800 are run.
    choices = {"model": "llama2-13b", "workload": "uniform-long", "num_adapters": 800, **OVERLAP}
    return [step_ms("grace-hopper", **choices) / step_ms("plora", **choices)]


def _knee() -> Sequence[float]:
    found = []
    for workload in ("uniform", "uniform-long"):
        curve = [tokens_per_s("plora", workload=workload, num_devices=n, **OVERLAP) for n in POOL]
        found.append(float(next(n for n, t in zip(POOL, curve, strict=True) if t >= 0.99 * max(curve))))
    return found


def _collapse() -> Sequence[float]:
    found = []
    for rate in (128.0, 450.0):
        full, pool = (tokens_per_s("plora", **_at(rate, num_devices=n, **OVERLAP)) for n in (32, 64))
        found.append(100 * (1 - pool / full))
    return found


def _latency() -> Sequence[float]:
    def step(nanoseconds: float) -> float:
        numbers = {"one_way_latency_ns": nanoseconds}
        return step_ms("plora", workload="uniform-long", link_numbers=numbers, **OVERLAP)

    none = step(0.0)
    return [100 * (1 - none / step(200.0)), 100 * (1 - none / step(2000.0))]


def _kv_share() -> Sequence[float]:
    found = [
        100 * run_of("plora", model=m, workload=w, batch_size=b, **OVERLAP).kv_share
        for m in ("llama2-7b", "llama2-13b")
        for w in ("uniform", "uniform-long")
        for b in (256, 512)
    ]
    return [min(found), max(found)]


def _ablation(system: str, workloads: Sequence[str] = ("lmsys", "uniform", "skewed")) -> Callable[[], Sequence[float]]:
    def ratios() -> Sequence[float]:
        found = [step_ms(system, workload=w, **ADDITIVE) / step_ms("plora", workload=w, **ADDITIVE) for w in workloads]
        return [sum(found) / len(found)]

    return ratios


def _breakdown() -> Sequence[float]:
    totals = [step_ms(s, **ADDITIVE) for s in ("pure-cxl", "n-e3", "nd-e3", "plora")]
    return [100 * (1 - after / before) for before, after in pairwise(totals)]


def _attention_divided() -> Sequence[float]:
    parts = [run_of(s, **ADDITIVE).played[0].demand.part_ps["attention"] for s in ("n-e3", "nd-e3")]
    return [parts[0] / parts[1]]


def _cached_gb() -> Sequence[float]:
    resolved = resolve(RunOptions(adapter_shape="square"))
    from plora.sim.llm.lora import adapter_bytes

    return [1000 * adapter_bytes(resolved.model, 49.6, part="B", shape="square") / 1e9]


@dataclass(frozen=True)
class Claim:
    """One figure of the paper.

    Attributes:
        section: where it stands.
        text: what is claimed, with the unit.
        paper: the figures; NaN where the paper has none.
        ours: works out this simulator's.
        note: what the comparison rests on.
    """

    section: str
    text: str
    paper: tuple[float, ...]
    ours: Callable[[], Sequence[float]]
    note: str = ""

    def verdict(self, found: Sequence[float]) -> str:
        """Return how the figures agree: the largest relative difference decides."""
        stated = [(f, p) for f, p in zip(found, self.paper, strict=True) if not math.isnan(p)]
        if not stated:
            return "-"
        worst = max(abs(f - p) / max(abs(p), 0.5) for f, p in stated)
        return "within 5 %" if worst <= 0.05 else "within 20 %" if worst <= 0.2 else "differs"


CLAIMS = (
    Claim(
        "VIII-1", "HBM floor, short contexts: 7B, 8B, 13B (ms)", (4.18, 4.78, 7.76), _floors, "stated parameters alone"
    ),
    Claim("VIII-1", "long-context plateau: 7B, 13B (tokens/s)", (3461, 2092), _plateau, "7B by construction"),
    Claim("VIII-1", "saturating link: 7B, 13B short; 7B, 13B long (GB/s)", (32, 32, 64, 64), _saturation),
    Claim("VIII-1", "gain from 128 to 1800 GB/s: short, long (%)", (0.0, 0.39), _gain_above_128),
    Claim("VIII-1", "PLoRA-NoCXL: lowest, highest (tokens/s)", (468, 690), _nocxl, "6 us launch by construction"),
    Claim("VIII-1", "PLoRA over NoCXL on the ladder: least, most", (4.0, 11.1), _over_nocxl),
    Claim("VIII-1", "CPU-LoRA-Offload at most (tokens/s)", (188,), _cpu, "20 us an exchange by construction"),
    Claim("VIII-3", "knee of the pool: short, long (devices)", (4, 16), _knee),
    Claim("VIII-3", "loss from 32 to 64 devices, short: 128, 450 GB/s (%)", (38, 0), _collapse),
    Claim("VIII-4", "loss by latency, long: 200, 2000 ns (%)", (0.3, 2.6), _latency),
    Claim(
        "VIII-5",
        "saturating link, naive waves: 70B TP4, 405B TP16, 1.2T TP64, long (GB/s)",
        (math.nan, math.nan, 450),
        _pods("naive"),
        "the paper gives the last, and that it climbs; shape of 1.2T chosen",
    ),
    Claim(
        "VIII-5",
        "saturating link, sharded waves: the same",
        (math.nan, math.nan, 8),
        _pods("sharded"),
        "the paper: 8 or 16, and that it falls",
    ),
    Claim("VIII-5", "HBM floor: 70B TP4, 405B TP16, 1.2T TP64 (ms)", (math.nan,) * 3, _pod_floors, "not stated"),
    Claim("VII-B", "Grace-Hopper over PLoRA, LMSYS: least, most", (1.6, 3.6), _grace_hopper_lmsys),
    Claim(
        "VII-B", "Grace-Hopper over PLoRA, 13B uniform-long", (13.6,), _grace_hopper_long, "adapters cached in HBM here"
    ),
    Claim("VII-D", "NS over NSD, short workloads, mean", (3.8,), _ablation("ns"), "additive, a port per device"),
    Claim("VII-D", "N(E3) over NSD, mean", (4.0,), _ablation("n-e3"), "as above"),
    Claim("VII-D", "N(E4) over NSD, mean", (3.8,), _ablation("n-e4"), "as above"),
    Claim("VII-D", "ND(E3) over NSD, mean", (1.30,), _ablation("nd-e3"), "as above"),
    Claim("VII-D", "ND(E4) over NSD, mean", (1.10,), _ablation("nd-e4"), "as above"),
    Claim("VII-D", "E4's matrices of 1000 adapters (GB)", (91,), _cached_gb, "square matrices; true shapes 135"),
    Claim(
        "VII-E",
        "N(E3) cuts Pure CXL, ND(E3) N(E3), NSD ND(E3) (%)",
        (33, 65, 8),
        _breakdown,
        "additive, a port per device",
    ),
    Claim("VII-E", "distributed attention divides attention by", (4.5,), _attention_divided, "as above"),
    Claim(
        "VII-E",
        "KV duplicated in HBM, batch 256-512: least, most (%)",
        (0.2, 13.5),
        _kv_share,
        "at batch 512; many decisions are equally fast",
    ),
    Claim(
        "VII-F",
        "PLoRA over NoCXL, 13B long: FP16, INT8, INT4",
        (4.4, 6.3, 7.8),
        _over_nocxl_by_kv,
        "integers at FP16 speed here",
    ),
)


def table() -> str:
    """Return the comparison as a Markdown table."""
    lines = ["| section | figure | paper | here | difference | note |", "|---|---|---|---|---|---|"]
    for claim in CLAIMS:
        found = claim.ours()
        paper, ours = (
            ", ".join("-" if math.isnan(v) else f"{v:.4g}" for v in values) for values in (claim.paper, found)
        )
        lines.append(f"| {claim.section} | {claim.text} | {paper} | {ours} | {claim.verdict(found)} | {claim.note} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
