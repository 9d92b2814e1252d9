"""What users ask of a serving run: latencies with percentiles, throughput, goodput."""

from __future__ import annotations

from typing import Any

import numpy as np

from plora.sim.serving.options import ServeOptions
from plora.sim.serving.outcome import Outcome
from plora.sim.system.clock import PS_PER_MS, PS_PER_S
from plora.sim.system.work import IntArray
from plora.sim.workload.requests import Requests

PERCENTILES = (50, 90, 95, 99)


def spread(values: Any, weights: Any = None) -> dict[str, float]:
    """Return mean and percentiles of `values`, each counted `weights` times; zeros if there are none.

    A percentile is the smallest value with at least that share of the weight at or below it.
    """
    found = np.asarray(values, dtype=np.float64)
    weight = np.ones(len(found)) if weights is None else np.asarray(weights, dtype=np.float64)
    total = float(weight.sum())
    if total <= 0:
        return {"mean": 0.0, **{f"p{p}": 0.0 for p in PERCENTILES}}
    order = np.argsort(found, kind="stable")
    cumulative = np.cumsum(weight[order])
    at = [min(int(np.searchsorted(cumulative, total * p / 100, side="left")), len(found) - 1) for p in PERCENTILES]
    return {
        "mean": float((found * weight).sum() / total),
        **{f"p{p}": float(found[order[i]]) for p, i in zip(PERCENTILES, at, strict=True)},
    }


def latencies_ms(requests: Requests, outcome: Outcome) -> dict[str, Any]:
    """Return the latencies (requests,) of every request in milliseconds; TPOT is NaN for a single token."""
    arrival = np.rint(requests.arrival_s * PS_PER_S)
    output = requests.output_tokens.astype(np.float64)
    decoding = (outcome.finished_ps - outcome.first_token_ps) / PS_PER_MS
    return {
        "queueing_ms": (outcome.admitted_ps - arrival) / PS_PER_MS,
        "ttft_ms": (outcome.first_token_ps - arrival) / PS_PER_MS,
        "tpot_ms": np.divide(decoding, output - 1, out=np.full(len(output), np.nan), where=output > 1),
        "e2e_ms": (outcome.finished_ps - arrival) / PS_PER_MS,
    }


def summary(requests: Requests, outcome: Outcome, options: ServeOptions) -> dict[str, Any]:
    """Return the metrics of a run.

    TPOT leaves the first token out; ITL is the interval before every token but the first of a
    request, preemptions included.
    """
    of_requests = latencies_ms(requests, outcome)
    tpot = of_requests["tpot_ms"]
    steps = np.asarray(outcome.step_ps, dtype=np.float64) / PS_PER_MS
    pauses = np.asarray(outcome.pauses_ps, dtype=np.float64) / PS_PER_MS
    intervals = np.concatenate([steps, pauses])
    tokens = np.concatenate([np.asarray(outcome.step_tokens, dtype=np.float64), np.ones(len(pauses))])
    seconds = outcome.duration_ps / PS_PER_S
    output = int(requests.output_tokens.sum(dtype=np.int64))
    good = (of_requests["ttft_ms"] <= options.slo_ttft_ms) & ~(tpot > options.slo_tpot_ms)
    rate = 1.0 / seconds if seconds > 0 else 0.0
    return {
        "requests": len(requests),
        "completed_requests": int((outcome.finished_ps >= 0).sum()),
        "duration_s": seconds,
        "ttft_ms": spread(of_requests["ttft_ms"]),
        "tpot_ms": spread(tpot[~np.isnan(tpot)]),
        "itl_ms": spread(intervals, tokens),
        "e2e_ms": spread(of_requests["e2e_ms"]),
        "queueing_ms": spread(of_requests["queueing_ms"]),
        "request_throughput_per_s": len(requests) * rate,
        "throughput_tokens_per_s": output * rate,
        "total_throughput_tokens_per_s": requests.total_tokens * rate,
        "goodput_requests_per_s": int(good.sum()) * rate,
        "good_requests": int(good.sum()),
        "preemptions": int(outcome.preemptions.sum()),
        "prompt_steps": outcome.prompt_steps,
        "decode_steps": outcome.decode_steps,
        "computed_prompt_tokens": outcome.prompt_tokens,
        "prefix_cache_hit_tokens": outcome.prefix_tokens,
        "prefix_cache_queried_tokens": outcome.asked_tokens,
        "kv_blocks": outcome.kv_blocks,
        "kv_blocks_peak": outcome.peak_blocks,
        "kv_block_tokens": outcome.block_tokens,
        "adapter_bytes_loaded": outcome.loaded_bytes,
        "adapter_bytes_loaded_ahead": outcome.ahead_bytes,
        "adapter_evictions": outcome.evictions,
        "token_steps_by_strategy": outcome.adapter_steps,
    }


def requests_csv(requests: Requests, outcome: Outcome) -> str:
    """Return one line for every request."""
    of_requests = latencies_ms(requests, outcome)
    names = ("queueing_ms", "ttft_ms", "tpot_ms", "e2e_ms")
    lines = [f"request,arrived_at,num_prefill_tokens,num_decode_tokens,lora_id,{','.join(names)},preemptions"]
    columns = [of_requests[name].tolist() for name in names]
    fixed = (requests.arrival_s, requests.input_tokens, requests.output_tokens, requests.adapter)
    rest = [column.tolist() for column in fixed]
    preempted: IntArray = outcome.preemptions
    for number, row in enumerate(zip(*rest, *columns, preempted.tolist(), strict=True)):
        arrived, prompt, output, adapter, *times, count = row
        shown = ",".join("" if value != value else f"{value:.6f}" for value in times)
        lines.append(f"{number},{arrived!r},{prompt},{output},{adapter},{shown},{count}")
    return "\n".join(lines) + "\n"


def samples_csv(outcome: Outcome) -> str:
    """Return batch, queue and KV blocks at every change of the batch."""
    lines = ["time_s,running,waiting,kv_blocks"]
    lines += [
        f"{time / PS_PER_S:.9f},{running},{waiting},{blocks}" for time, running, waiting, blocks in outcome.samples
    ]
    return "\n".join(lines) + "\n"
