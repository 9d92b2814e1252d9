"""Times of the GPU's part of a step in whole picoseconds, by roofline or by calibrated kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from plora.sim.hardware import kernels
from plora.sim.hardware.gpu import Gpu, GpuMode
from plora.sim.hardware.link import Link
from plora.sim.llm.config import ModelConfig
from plora.sim.llm.moe import expected_distinct_experts
from plora.sim.system.clock import PS_PER_NS, PS_PER_S, duration_ps

SHARP = 64.0
"""A smooth maximum this sharp is a maximum for all purposes."""


@dataclass(frozen=True)
class GpuTimes:
    """Kernel times of one of `gpus` GPUs that share `model` evenly.

    ``roofline`` is the slower of HBM and arithmetic at their stated rates, with no constants, as the
    paper counts. ``calibrated`` takes `plora.sim.hardware.kernels`. No grouped adapter kernel was
    measured: adapters in HBM take one shrink and one expand kernel a group, with their measured
    constants, and stream at the rate that large matrices reach. Routed experts may be spread over
    `expert_parallel` such GPUs, each of which serves requests of its own.
    """

    gpu: Gpu
    model: ModelConfig
    mode: GpuMode
    gpus: int
    fabric: Link
    expert_parallel: int = 1

    @cached_property
    def hbm_ps(self) -> float:
        """Picoseconds per byte of a long stream."""
        share = 1.0 if self.mode == "roofline" else kernels.calibration(self.gpu).gemm.memory_efficiency
        return PS_PER_S / (self.gpu.hbm_gb_per_s * 1e9 * share)

    @cached_property
    def flop_ps(self) -> float:
        """Picoseconds per operation."""
        share = 1.0 if self.mode == "roofline" else kernels.calibration(self.gpu).gemm.compute_efficiency
        return PS_PER_S / (self.gpu.fp16_tflops * 1e12 * share)

    def base_ps(self, group: str, tokens: int, weight_bytes: int, flops: float, everyone: int | None = None) -> int:
        """Time of the base model's kernels of one group for `tokens` tokens.

        `everyone` counts the tokens of all GPUs that share the experts; by default they are alike.
        """
        if self.mode == "roofline":
            return max(duration_ps(weight_bytes, self.hbm_ps), duration_ps(flops, self.flop_ps))
        if everyone is None:
            everyone = tokens * self.expert_parallel
        return round(PS_PER_NS * self._calibrated_base_ns(group, tokens, everyone))

    def _calibrated_base_ns(self, group: str, tokens: int, everyone: int) -> float:
        model, gpus = self.model, self.gpus
        hidden, size = model.hidden_size, model.weight_bytes

        def gemm(n: float, k: float) -> float:
            return kernels.gemm_ns(self.gpu, tokens, n, k, "calibrated", weight_bytes=size)

        def passes(widths: float) -> float:
            return kernels.elementwise_ns(self.gpu, kernels.FP16_BYTES * tokens * widths, "calibrated")

        heads = model.num_attention_heads // gpus
        kv_heads = max(1, model.num_key_value_heads // gpus)
        if group == "head":
            return gemm(model.vocab_size / gpus, hidden)
        if group == "attention_in":
            return passes(4 * hidden) + gemm((heads + 2 * kv_heads) * model.head_dim, hidden)
        if group == "attention_out":
            return gemm(hidden, heads * model.head_dim)
        dense = model.intermediate_size / gpus
        if group == "mlp_in":
            return passes(4 * hidden) + gemm(2 * dense, hidden)
        if group == "mlp_mid":
            return passes(3 * dense) + gemm(hidden, dense)
        # One fused kernel does gate, up and down of the routed experts; the router goes with it. Where
        # adapters come between, its matrices take their share of its time.
        share = {"experts": 1.0, "experts_in": 2 / 3, "experts_mid": 1 / 3}[group]
        return share * self._calibrated_experts_ns(tokens, everyone)

    def _calibrated_experts_ns(self, tokens: int, everyone: int) -> float:
        model, gpus, size = self.model, self.gpus, self.model.weight_bytes
        hidden, spread = model.hidden_size, self.expert_parallel
        assert model.moe is not None

        def gemm(n: float, k: float) -> float:
            return kernels.gemm_ns(self.gpu, tokens, n, k, "calibrated", weight_bytes=size)

        total = kernels.elementwise_ns(self.gpu, kernels.FP16_BYTES * tokens * 4 * hidden, "calibrated")
        total += gemm(model.moe.num_experts, hidden)
        total += kernels.moe_ns(
            self.gpu,
            everyone,
            hidden=hidden,
            inter=model.moe.expert_intermediate_size / gpus,
            top_k=model.moe.experts_per_token,
            distinct=expected_distinct_experts(model.moe.num_experts, model.moe.experts_per_token, everyone) / spread,
            mode="calibrated",
            weight_bytes=model.expert_weight_bytes,
            sharded=gpus > 1 or spread > 1,
            routed=everyone * model.moe.experts_per_token / spread,
        )
        if spread > 1:
            # Everybody's tokens are gathered before the experts and their results scattered after.
            message = kernels.FP16_BYTES * everyone * hidden
            total += 2 * kernels.exchange_ns(self.gpu, self.fabric, message, spread, "calibrated")
        if model.moe.shared_expert_intermediate_size:
            shared = model.moe.shared_expert_intermediate_size / gpus
            total += gemm(2 * shared, hidden) + gemm(hidden, shared)
        return total

    def attention_ps(self, requests: int, tokens: Any, token_bytes: float, token_flops: float) -> Any:
        """Time of attention over `tokens` tokens in HBM, for `requests` requests in one layer.

        `tokens` is an integer array; the result is int64 of its shape, 0 where there are none.
        """
        tokens = np.asarray(tokens)
        if self.mode == "roofline":
            memory = np.rint(tokens * token_bytes * self.hbm_ps)
            compute = np.rint(tokens * token_flops * self.flop_ps)
            return np.maximum(memory, compute).astype(np.int64)
        # As kernels.decode_attention_ns, with what does not change looked up once.
        fit, at, items = self._attention_fit
        ns = 1e3 * kernels.decode_attention_us(fit, at, requests * items, tokens * token_bytes)
        return np.where(tokens > 0, np.rint(ns * PS_PER_NS), 0).astype(np.int64)

    @cached_property
    def _attention_fit(self) -> tuple[kernels.DecodeAttentionFit, kernels.Rates, int]:
        """Coefficients, rates, and work items of a request."""
        fit, at = kernels.calibration(self.gpu).decode_attention, kernels.rates(self.gpu)
        return fit, at, max(1, self.model.num_key_value_heads // self.gpus)

    def attention_curve(self, requests: int) -> tuple[float, float, float, float]:
        """Return how `attention_ps` depends on the bytes read: constant, floor, time per byte, sharpness.

        The time is ``constant + blend(floor, bytes * per byte)`` with the smooth maximum of
        `plora.sim.hardware.kernels`.
        """
        if self.mode == "roofline":
            return 0.0, 0.0, self.hbm_ps, SHARP
        fit = kernels.calibration(self.gpu).decode_attention
        items = requests * max(1, self.model.num_key_value_heads // self.gpus)
        per_us = 1000 * PS_PER_NS
        per_byte = PS_PER_S / (self.gpu.hbm_gb_per_s * 1e9 * fit.memory_efficiency)
        floor = fit.us_per_wave * items / self.gpu.sms * per_us
        return fit.constant_us * per_us, floor, per_byte, fit.sharpness

    def lora_ps(self, hbm_bytes: int, flops: int, kernels_share: float) -> int:
        """Time of adapter products on the GPU that start `kernels_share` of a shrink and an expand kernel."""
        stream = max(duration_ps(hbm_bytes, self.hbm_ps), duration_ps(flops, self.flop_ps))
        return stream + round(self.lora_kernels_ps * kernels_share)

    @cached_property
    def lora_kernels_ps(self) -> int:
        """Constants of a shrink and an expand kernel."""
        if self.mode == "roofline":
            return 0
        fits = kernels.calibration(self.gpu)
        return round((fits.lora_shrink.constant_us + fits.lora_expand.constant_us) * 1000 * PS_PER_NS)

    def merge_ps(self, moved_bytes: int) -> int:
        """Time of the kernel that adds or rescales what came back from the far side."""
        if self.mode == "roofline":
            return 0
        constant_ns, bytes_per_ns = self._elementwise
        return round(PS_PER_NS * (constant_ns + moved_bytes / bytes_per_ns))

    @cached_property
    def _elementwise(self) -> tuple[float, float]:
        """As kernels.elementwise_ns: a constant in nanoseconds, and bytes a nanosecond."""
        fit = kernels.calibration(self.gpu).elementwise
        return 1e3 * fit.constant_us, self.gpu.hbm_gb_per_s * fit.memory_efficiency

    def all_reduce_ps(self, message_bytes: int) -> int:
        """Time to sum `message_bytes` over the GPUs."""
        return round(PS_PER_NS * kernels.all_reduce_ns(self.gpu, self.fabric, message_bytes, self.gpus, self.mode))
