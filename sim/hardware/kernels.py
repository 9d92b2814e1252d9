"""Times of GPU kernels: by roofline, or corrected by coefficients fitted to measured tables.

Every calibrated kernel has one form: a constant, and a smooth maximum of what memory and arithmetic
take at fitted efficiencies::

    blend(a, b) = (a**s + b**s)**(1/s)        s: sharpness; large s is max(), s = 1 is a + b

The functions on coefficients take numpy arrays, because the fit (`plora.sim.calibration.gpu`) and
the simulator must use the same ones. Bytes per second and operations per second scale with the
GPU's data sheet; constants do not.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from plora.hw.defs.errors import UserError
from plora.sim.datafile import pick
from plora.sim.hardware.gpu import Gpu, GpuMode, roofline_ns
from plora.sim.hardware.link import Link

FloatArray: TypeAlias = npt.NDArray[np.float64]
Real: TypeAlias = Any
"""A float or a numpy array of floats, as numpy's own operators take them."""
R = TypeVar("R", float, FloatArray)

_CALIBRATION = Path(__file__).parent / "data" / "gpu_calibration.json"

TILE_ROWS = 64
"""Rows to which tensor-core GEMMs pad the token dimension."""

FP16_BYTES = 2.0


class Rates(msgspec.Struct, frozen=True):
    """What a data sheet says: 1e9 bytes/s, 1e12 operations/s, multiprocessors."""

    gb_per_s: float
    tflops: float
    sms: float


class GemmFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dense GEMM of a projection, both dimensions at least 512."""

    constant_us: float
    memory_efficiency: float
    compute_efficiency: float
    sharpness: float


class LoraGemmFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dense GEMM of one adapter matrix: one dimension is a rank. `us_per_1k_depth` is the serial
    cost of a long inner dimension that few tiles share."""

    constant_us: float
    memory_efficiency: float
    compute_efficiency: float
    sharpness: float
    us_per_1k_depth: float


class DecodeAttentionFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Attention of one new token per request. `us_per_wave` is the floor of a wave of work items,
    one item per request and KV head, over the multiprocessors."""

    constant_us: float
    us_per_wave: float
    memory_efficiency: float
    sharpness: float


class PrefillAttentionFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Causal attention of many new tokens, with the KV write that vLLM's benchmark includes."""

    constant_us: float
    us_per_wave: float
    memory_efficiency: float
    compute_efficiency: float
    sharpness: float


class MoeFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fused mixture-of-experts MLP (gated). `pad_rows` are padding rows per touched expert.

    Fitted once to whole layers and once to shards, whose narrow matrices cost more than their share.
    """

    constant_us: float
    memory_efficiency: float
    compute_efficiency: float
    activation_efficiency: float
    sharpness: float
    pad_rows: float


class AllReduceFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All-reduce within a captured graph: constant + per doubling of the GPUs + scale * wire_us**exponent,
    where wire_us = 2 (n - 1) / n bytes / (one direction of the fabric)."""

    constant_us: float
    us_per_doubling: float
    wire_scale: float
    wire_exponent: float


class ElementwiseFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Norms, activations, residual adds."""

    constant_us: float
    memory_efficiency: float


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All coefficients of one GPU; `origin` says to what they were fitted."""

    origin: str
    gemm: GemmFit
    lora_shrink: LoraGemmFit
    lora_expand: LoraGemmFit
    decode_attention: DecodeAttentionFit
    prefill_attention: PrefillAttentionFit
    moe: MoeFit
    moe_sharded: MoeFit
    all_reduce: AllReduceFit
    elementwise: ElementwiseFit
    errors: dict[str, dict[str, float]]


@cache
def load_calibrations() -> dict[str, Calibration]:
    """The committed coefficients, by name."""
    return msgspec.json.decode(_CALIBRATION.read_bytes(), type=dict[str, Calibration])


def calibration(gpu: Gpu) -> Calibration:
    """The coefficients that `gpu` names; raises :class:`UserError` that lists those there are."""
    return pick(gpu.calibration, load_calibrations(), "GPU calibration")


def rates(gpu: Gpu) -> Rates:
    """The data-sheet rates of `gpu`."""
    return Rates(gpu.hbm_gb_per_s, gpu.fp16_tflops, gpu.sms)


def blend(a: Real, b: Real, sharpness: float) -> Real:
    """Smooth maximum of `a` and `b`."""
    return (a**sharpness + b**sharpness) ** (1.0 / sharpness)


def _padded(rows: Real, tile: int) -> Real:
    return -(-rows // tile) * tile


def gemm_us(fit: GemmFit, at: Rates, m: Real, n: Real, k: Real, weight_bytes: float = FP16_BYTES) -> Real:
    """(m, k) x (k, n), weights of `weight_bytes` per element."""
    moved = weight_bytes * k * n + FP16_BYTES * m * (k + n)
    operations = 2.0 * _padded(m, TILE_ROWS) * n * k
    return fit.constant_us + blend(
        moved / (at.gb_per_s * 1e3 * fit.memory_efficiency),
        operations / (at.tflops * 1e6 * fit.compute_efficiency),
        fit.sharpness,
    )


def lora_gemm_us(fit: LoraGemmFit, at: Rates, m: Real, n: Real, k: Real) -> Real:
    """(m, k) x (k, n) of which n (shrink) or k (expand) is a rank; one adapter, not grouped."""
    moved = FP16_BYTES * (k * n + m * (k + n))
    operations = 2.0 * _padded(m, TILE_ROWS) * _padded(n, TILE_ROWS) * k
    return (
        fit.constant_us
        + fit.us_per_1k_depth * k * 1e-3
        + blend(
            moved / (at.gb_per_s * 1e3 * fit.memory_efficiency),
            operations / (at.tflops * 1e6 * fit.compute_efficiency),
            fit.sharpness,
        )
    )


def decode_attention_us(fit: DecodeAttentionFit, at: Rates, items: Real, kv_bytes: Real) -> Real:
    """`items` requests x KV heads that together read `kv_bytes` of keys and values."""
    return fit.constant_us + blend(
        fit.us_per_wave * items / at.sms, kv_bytes / (at.gb_per_s * 1e3 * fit.memory_efficiency), fit.sharpness
    )


def prefill_attention_us(fit: PrefillAttentionFit, at: Rates, items: Real, moved: Real, operations: Real) -> Real:
    """`items` sequences x KV heads; `moved` bytes of Q, K, V and O; `operations` of the causal products."""
    work = moved / (at.gb_per_s * 1e3 * fit.memory_efficiency) + operations / (at.tflops * 1e6 * fit.compute_efficiency)
    return fit.constant_us + blend(fit.us_per_wave * items / at.sms, work, fit.sharpness)


def moe_us(
    fit: MoeFit,
    at: Rates,
    *,
    tokens: Real,
    routed: Real,
    distinct: Real,
    hidden: Real,
    inter: Real,
    top_k: Real,
    weight_bytes: float = FP16_BYTES,
) -> Real:
    """`tokens` tokens of which `routed` (token, expert) pairs meet `distinct` of this GPU's experts."""
    weights = weight_bytes * distinct * 3 * hidden * inter
    operations = 6.0 * (routed + distinct * fit.pad_rows) * hidden * inter
    activations = FP16_BYTES * 3 * (tokens * top_k * hidden + routed * inter)
    return (
        fit.constant_us
        + blend(
            weights / (at.gb_per_s * 1e3 * fit.memory_efficiency),
            operations / (at.tflops * 1e6 * fit.compute_efficiency),
            fit.sharpness,
        )
        + activations / (at.gb_per_s * 1e3 * fit.activation_efficiency)
    )


def all_reduce_us(fit: AllReduceFit, gb_per_s: float, gpus: Real, message_bytes: Real) -> Real:
    """All-reduce of `message_bytes` per GPU over a fabric of `gb_per_s` per direction and GPU."""
    wire = 2.0 * (gpus - 1) / gpus * message_bytes / (gb_per_s * 1e3)
    return fit.constant_us + fit.us_per_doubling * np.log2(gpus) + fit.wire_scale * wire**fit.wire_exponent


# What the simulator calls. Nanoseconds; `mode` as in plora.sim.hardware.gpu.


def _check(gpu: Gpu, mode: str, **sizes: float) -> None:
    if mode not in ("roofline", "calibrated"):
        raise UserError(f"unknown GPU mode {mode!r}; known: roofline, calibrated")
    for name, value in sizes.items():
        if not value >= 0:
            raise UserError(f"GPU {gpu.name}: {name} is {value!r}; give a number of at least 0")


def gemm_ns(gpu: Gpu, m: float, n: float, k: float, mode: GpuMode, weight_bytes: float = FP16_BYTES) -> float:
    """y (m, n) = x (m, k) W (k, n). The roofline charges the weights only: x and y stay on the chip."""
    _check(gpu, mode, m=m, n=n, k=k)
    if m == 0 or n == 0 or k == 0:
        return 0.0
    if mode == "roofline":
        return roofline_ns(gpu, weight_bytes * n * k, 2.0 * m * n * k)
    return float(1e3 * gemm_us(calibration(gpu).gemm, rates(gpu), m, n, k, weight_bytes))


def lora_gemm_ns(gpu: Gpu, m: float, n: float, k: float, mode: GpuMode) -> float:
    """One adapter matrix on the GPU: the smaller of n and k is the rank."""
    _check(gpu, mode, m=m, n=n, k=k)
    if m == 0 or n == 0 or k == 0:
        return 0.0
    if mode == "roofline":
        return roofline_ns(gpu, FP16_BYTES * n * k, 2.0 * m * n * k)
    fits = calibration(gpu)
    return float(1e3 * lora_gemm_us(fits.lora_shrink if n <= k else fits.lora_expand, rates(gpu), m, n, k))


def decode_attention_ns(
    gpu: Gpu,
    requests: float,
    attended_tokens: R,
    *,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    mode: GpuMode,
    element_bytes: float = FP16_BYTES,
) -> R:
    """One layer's attention of one new token for each of `requests`, over `attended_tokens` in all.

    `attended_tokens` (the sum of the contexts) may be an array, for steps that differ only in it.
    Roofline: the larger of reading keys and values and of 4 x query_heads x head_dim operations a
    token.
    """
    _check(gpu, mode, requests=requests)
    kv_bytes = attended_tokens * (2.0 * kv_heads * head_dim * element_bytes)
    if mode == "roofline":
        per_byte = max(1.0 / gpu.hbm_gb_per_s, 2.0 * query_heads / (kv_heads * element_bytes) / (gpu.fp16_tflops * 1e3))
        return kv_bytes * per_byte
    if requests == 0:
        return attended_tokens * 0.0
    fit = calibration(gpu).decode_attention
    result: R = 1e3 * decode_attention_us(fit, rates(gpu), requests * kv_heads, kv_bytes)
    return result


def prefill_attention_ns(
    gpu: Gpu,
    new_tokens: float,
    past_tokens: float = 0.0,
    sequences: float = 1.0,
    *,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    mode: GpuMode,
) -> float:
    """One layer's causal attention of `sequences` sequences, each with `new_tokens` after `past_tokens`."""
    _check(gpu, mode, new_tokens=new_tokens, past_tokens=past_tokens, sequences=sequences)
    if new_tokens == 0 or sequences == 0:
        return 0.0
    pairs = new_tokens * (past_tokens + (new_tokens + 1) / 2)
    operations = 4.0 * sequences * query_heads * head_dim * pairs
    moved = 2 * FP16_BYTES * sequences * head_dim * (new_tokens * query_heads + (new_tokens + past_tokens) * kv_heads)
    if mode == "roofline":
        return roofline_ns(gpu, moved, operations)
    fit = calibration(gpu).prefill_attention
    return float(1e3 * prefill_attention_us(fit, rates(gpu), sequences * kv_heads, moved, operations))


def moe_ns(
    gpu: Gpu,
    tokens: float,
    *,
    hidden: int,
    inter: float,
    top_k: int,
    distinct: float,
    mode: GpuMode,
    weight_bytes: float = FP16_BYTES,
    sharded: bool = False,
    routed: float | None = None,
) -> float:
    """One layer's routed MLP: `tokens` tokens meet `distinct` experts of width `inter`.

    `sharded` is whether this GPU holds only a share of the layer: of the experts' width (`inter` is
    that share), or of the experts (`routed` then counts the (token, expert) pairs that stay here;
    by default all of them).
    """
    pairs = tokens * top_k if routed is None else routed
    _check(gpu, mode, tokens=tokens, distinct=distinct)
    if tokens == 0:
        return 0.0
    if mode == "roofline":
        operations = 6.0 * pairs * hidden * inter
        return roofline_ns(gpu, weight_bytes * distinct * 3 * hidden * inter, operations)
    fits = calibration(gpu)
    fit = fits.moe_sharded if sharded else fits.moe
    return float(
        1e3
        * moe_us(
            fit,
            rates(gpu),
            tokens=tokens,
            routed=pairs,
            distinct=distinct,
            hidden=hidden,
            inter=inter,
            top_k=top_k,
            weight_bytes=weight_bytes,
        )
    )


def all_reduce_ns(gpu: Gpu, fabric: Link, message_bytes: float, gpus: int, mode: GpuMode) -> float:
    """All-reduce of `message_bytes` over `gpus` GPUs. Roofline: 2 (n - 1) / n bytes at the fabric's rate."""
    _check(gpu, mode, message_bytes=message_bytes)
    if gpus <= 1 or message_bytes == 0:
        return 0.0
    if mode == "roofline":
        return 2.0 * (gpus - 1) / gpus * message_bytes / fabric.gb_per_s
    return float(1e3 * all_reduce_us(calibration(gpu).all_reduce, fabric.gb_per_s, gpus, message_bytes))


def exchange_ns(gpu: Gpu, fabric: Link, message_bytes: float, gpus: int, mode: GpuMode) -> float:
    """All-gather or reduce-scatter whose full buffer is `message_bytes`: half an all-reduce's traffic.

    Calibrated with the all-reduce's coefficients, of which either is one half in both of the
    algorithms that libraries use; not measured on its own.
    """
    return all_reduce_ns(gpu, fabric, message_bytes / 2, gpus, mode)


def elementwise_ns(gpu: Gpu, moved_bytes: float, mode: GpuMode) -> float:
    """A norm, activation or residual add that moves `moved_bytes`. Roofline: fused away, 0."""
    _check(gpu, mode, moved_bytes=moved_bytes)
    if mode == "roofline":
        return 0.0
    fit = calibration(gpu).elementwise
    return 1e3 * fit.constant_us + moved_bytes / (gpu.hbm_gb_per_s * fit.memory_efficiency)
