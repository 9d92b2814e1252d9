"""The choices of a serving run beside those of the system."""

from __future__ import annotations

import math

import msgspec

from plora.hw.defs.errors import UserError

_SLOWEST_PER_S = 1e-3
"""Slowest arrivals: with fewer, times of long runs leave 64-bit picoseconds."""

_MOST_REPLICAS = 1024


class ServeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How requests come and how they are batched; names are those of vLLM where it has them.

    Attributes:
        num_requests: requests of a named workload; of a trace, its first ones (None: 512, or the whole trace).
        request_rate: arrivals per second of a named workload; infinite sends all at once.
        cv: coefficient of variation of the intervals.
        input_tokens, output_tokens: mean lengths instead of the workload's.
        max_num_seqs: requests that run together.
        max_num_batched_tokens: tokens of a step, prompts included.
        enable_chunked_prefill: prompts share steps with decoding requests, in pieces if need be;
            otherwise a step is either prompts or decoding, prompts first.
        async_scheduling: a step is scheduled while the one before it runs, so that a request that comes to a
            busy replica joins the step after the next.
        block_size: tokens of a KV block.
        enable_prefix_caching: keep keys and values of prompts for later ones of the same adapter that begin alike.
        shared_prefix_tokens: tokens with which every prompt of a named workload begins.
        data_parallel_size: replicas of the system; requests go to them in turn.
        enable_expert_parallel: the replicas share their routed experts and step together.
        slo_ttft_ms, slo_tpot_ms: a request counts as good if it keeps both.
        max_steps_at_once: steps that are advanced together at most; results do not depend on it.
    """

    num_requests: int | None = None
    request_rate: float = math.inf
    cv: float = 1.0
    input_tokens: int | None = None
    output_tokens: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    enable_chunked_prefill: bool = True
    async_scheduling: bool = False
    block_size: int = 16
    enable_prefix_caching: bool = False
    shared_prefix_tokens: int = 0
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    slo_ttft_ms: float = 2000.0
    slo_tpot_ms: float = 100.0
    max_steps_at_once: int = 256


def check_options(options: ServeOptions) -> ServeOptions:
    """Return `options` if every number is in range; raises `UserError` otherwise."""
    whole = {
        "num_requests": (options.num_requests, 1),
        "input_tokens": (options.input_tokens, 1),
        "output_tokens": (options.output_tokens, 1),
        "max_num_seqs": (options.max_num_seqs, 1),
        "max_num_batched_tokens": (options.max_num_batched_tokens, 1),
        "block_size": (options.block_size, 1),
        "shared_prefix_tokens": (options.shared_prefix_tokens, 0),
        "data_parallel_size": (options.data_parallel_size, 1),
        "max_steps_at_once": (options.max_steps_at_once, 1),
    }
    for name, (value, least) in whole.items():
        most = _MOST_REPLICAS if name == "data_parallel_size" else 1 << 24
        if value is not None and not least <= value <= most:
            raise UserError(f"{name} is {value}; give {least} to {most}")
    if options.enable_expert_parallel and options.data_parallel_size == 1:
        raise UserError("enable_expert_parallel spreads experts over replicas; give a data_parallel_size above 1")
    if not options.request_rate >= _SLOWEST_PER_S:
        raise UserError(
            f"request_rate is {options.request_rate:g} per second; give at least {_SLOWEST_PER_S:g}, or inf"
        )
    for name in ("cv", "slo_ttft_ms", "slo_tpot_ms"):
        value = getattr(options, name)
        if not (math.isfinite(value) and value >= 0):
            raise UserError(f"{name} is {value:g}; give a finite number of at least 0")
    if options.enable_chunked_prefill and options.max_num_batched_tokens <= options.max_num_seqs:
        raise UserError(
            f"max_num_batched_tokens {options.max_num_batched_tokens} leaves no room for prompts beside "
            f"{options.max_num_seqs} decoding requests; raise it or lower max_num_seqs"
        )
    return options
