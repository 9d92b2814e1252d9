"""One forward pass of a base model on one GPU or a tensor-parallel group, without adapters.

The kernels of a step in order, one after another as a GPU runs them: this is the base that every
system shares, and what is compared with measured decode times. Adapters, near-data attention and
serving are the system model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plora.hw.defs.errors import UserError
from plora.sim.hardware import kernels
from plora.sim.hardware.gpu import Gpu, GpuMode, roofline_ns
from plora.sim.hardware.link import Link, load_link
from plora.sim.llm.config import ModelConfig, WeightsMode
from plora.sim.llm.kv import attended_tokens, kv_element_bytes
from plora.sim.llm.moe import expected_distinct_experts
from plora.sim.llm.shapes import active_parameters, decode_weight_bytes


@dataclass(frozen=True)
class Prefill:
    """A chunk of a prompt: `new_tokens` computed now after `past_tokens` already cached.

    `last` is whether the chunk ends the prompt and so needs the output head.
    """

    new_tokens: int
    past_tokens: int = 0
    last: bool = True


@dataclass(frozen=True)
class GpuStepTime:
    """Nanoseconds by kind of kernel, summed over the layers."""

    linear_ns: float
    attention_ns: float
    moe_ns: float
    elementwise_ns: float
    exchange_ns: float
    head_ns: float

    @property
    def total_ns(self) -> float:
        """The whole step."""
        return self.linear_ns + self.attention_ns + self.moe_ns + self.elementwise_ns + self.exchange_ns + self.head_ns


def step_time(
    gpu: Gpu,
    model: ModelConfig,
    *,
    decode_requests: int = 0,
    decode_context: float = 0.0,
    prefills: Sequence[Prefill] = (),
    tp: int = 1,
    ep: int = 1,
    mode: GpuMode = "calibrated",
    kv_dtype: str = "fp16",
    weights: WeightsMode | None = None,
    fabric: Link | None = None,
) -> GpuStepTime:
    """Time of one forward pass of `decode_requests` one-token requests and any prefill chunks.

    `decode_context` is the mean number of tokens a decoding request attends to. ``calibrated`` sums
    corrected kernels; ``roofline`` takes max(weight bytes / HBM, operations / peak) for everything
    but attention and adds attention, as the paper's floor figures do.

    `tp` shards every matrix over that many GPUs, with two all-reduces a layer. `ep` spreads the
    experts over that many GPUs, each of which serves requests like these (data parallel): a layer
    gathers everybody's tokens before its experts and scatters the results after. Raises
    :class:`UserError` if `tp` does not divide the heads or `ep` the experts, or both exceed 1.
    """
    if ep < 1 or (ep > 1 and (tp > 1 or model.moe is None or model.moe.num_experts % ep)):
        raise UserError(
            f"expert parallelism {ep} of {model.name} with tensor parallelism {tp} is not covered; "
            "use one of them, and a divisor of the number of experts"
        )
    if tp < 1 or model.num_attention_heads % tp or (model.num_key_value_heads % tp and tp % model.num_key_value_heads):
        raise UserError(
            f"tensor parallelism {tp} does not divide {model.num_attention_heads} query and "
            f"{model.num_key_value_heads} KV heads of {model.name}; choose a divisor"
        )
    if decode_requests < 0 or decode_context < 0:
        raise UserError(f"a step of {decode_requests} requests at context {decode_context}; give at least 0")
    tokens = decode_requests + sum(chunk.new_tokens for chunk in prefills)
    outputs = decode_requests + sum(1 for chunk in prefills if chunk.last)
    kv_heads = max(1, model.num_key_value_heads // tp)
    attention = _attention_ns(gpu, model, decode_requests, decode_context, prefills, tp, kv_heads, mode, kv_dtype)
    if tokens == 0:
        return GpuStepTime(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    if mode == "roofline":
        operations = 2.0 * tokens * active_parameters(model, embedding=False)
        read = decode_weight_bytes(model, tokens * ep, weights) / tp
        if ep > 1:
            one = decode_weight_bytes(model, tokens, weights, experts="active")
            read = one + (read - one) / ep
        base = roofline_ns(gpu, read, operations / tp)
        exchanged = _exchanges(gpu, model, tokens, tp, ep, mode, fabric)
        return GpuStepTime(base, attention, 0.0, 0.0, exchanged, 0.0)
    linear, moe = _layers(gpu, model, tokens, tp, ep, kv_heads)
    return GpuStepTime(
        linear_ns=linear,
        attention_ns=attention,
        moe_ns=moe,
        elementwise_ns=_elementwise(gpu, model, tokens, tp),
        exchange_ns=_exchanges(gpu, model, tokens, tp, ep, mode, fabric),
        head_ns=kernels.gemm_ns(
            gpu, outputs, model.vocab_size / tp, model.hidden_size, mode, weight_bytes=model.weight_bytes
        ),
    )


def decode_step_time(
    gpu: Gpu,
    model: ModelConfig,
    batch: int,
    context: float,
    *,
    tp: int = 1,
    mode: GpuMode = "calibrated",
    kv_dtype: str = "fp16",
    weights: WeightsMode | None = None,
) -> GpuStepTime:
    """One decode step of `batch` requests at mean `context`; see :func:`step_time`."""
    return step_time(
        gpu,
        model,
        decode_requests=batch,
        decode_context=context,
        tp=tp,
        mode=mode,
        kv_dtype=kv_dtype,
        weights=weights,
    )


def _attention_ns(
    gpu: Gpu,
    model: ModelConfig,
    requests: int,
    context: float,
    prefills: Sequence[Prefill],
    tp: int,
    kv_heads: int,
    mode: GpuMode,
    kv_dtype: str,
) -> float:
    heads, layers = model.num_attention_heads // tp, model.num_hidden_layers
    total = 0.0
    if requests:
        total += layers * kernels.decode_attention_ns(
            gpu,
            requests,
            requests * attended_tokens(model, context),
            query_heads=heads,
            kv_heads=kv_heads,
            head_dim=model.head_dim,
            mode=mode,
            element_bytes=kv_element_bytes(kv_dtype),
        )
    for chunk in prefills:
        # a window shortens the past that a chunk sees; within a chunk the causal half stays an upper bound
        past = attended_tokens(model, chunk.past_tokens)
        total += layers * kernels.prefill_attention_ns(
            gpu, chunk.new_tokens, past, query_heads=heads, kv_heads=kv_heads, head_dim=model.head_dim, mode=mode
        )
    return total


def _layers(gpu: Gpu, model: ModelConfig, tokens: float, tp: int, ep: int, kv_heads: int) -> tuple[float, float]:
    """Projections and routed MLPs of all layers, as engines fuse them: qkv, o, gate-up, down."""
    hidden, width = model.hidden_size, model.head_dim

    def gemm(n: float, k: float) -> float:
        return kernels.gemm_ns(gpu, tokens, n, k, "calibrated", weight_bytes=model.weight_bytes)

    def dense_mlp(inter: float) -> float:
        return gemm(2 * inter / tp, hidden) + gemm(hidden, inter / tp)

    heads = model.num_attention_heads // tp
    linear = model.num_hidden_layers * (gemm((heads + 2 * kv_heads) * width, hidden) + gemm(hidden, heads * width))
    linear += model.dense_layers * dense_mlp(model.intermediate_size)
    if model.moe is None:
        return linear, 0.0
    moe = model.moe
    routed = moe.layers * kernels.moe_ns(
        gpu,
        tokens * ep,
        hidden=hidden,
        inter=moe.expert_intermediate_size / tp,
        top_k=moe.experts_per_token,
        distinct=expected_distinct_experts(moe.num_experts, moe.experts_per_token, tokens * ep) / ep,
        mode="calibrated",
        weight_bytes=model.expert_weight_bytes,
        sharded=tp > 1 or ep > 1,
        routed=tokens * moe.experts_per_token,
    )
    if moe.shared_expert_intermediate_size:
        linear += moe.layers * dense_mlp(moe.shared_expert_intermediate_size)
    linear += moe.layers * gemm(moe.num_experts, hidden)  # the router
    return linear, routed


def _elementwise(gpu: Gpu, model: ModelConfig, tokens: float, tp: int) -> float:
    """Two residual-and-norm kernels a layer and one activation; each reads and writes its operands once."""
    norm = kernels.elementwise_ns(gpu, 4 * kernels.FP16_BYTES * tokens * model.hidden_size, "calibrated")
    activation = kernels.elementwise_ns(
        gpu, 3 * kernels.FP16_BYTES * tokens * model.intermediate_size / tp, "calibrated"
    )
    routed = model.moe.layers if model.moe else 0  # the fused mixture kernel holds its own activation
    return 2 * model.num_hidden_layers * norm + (model.num_hidden_layers - routed) * activation


def _exchanges(
    gpu: Gpu, model: ModelConfig, tokens: float, tp: int, ep: int, mode: GpuMode, fabric: Link | None
) -> float:
    """All-reduces of tensor parallelism, gathers and scatters of expert parallelism."""
    if tp == 1 and ep == 1:
        return 0.0
    link = fabric or load_link(gpu.fabric)
    message = kernels.FP16_BYTES * tokens * model.hidden_size
    if tp > 1:
        return 2 * model.num_hidden_layers * kernels.all_reduce_ns(gpu, link, message, tp, mode)
    layers = model.moe.layers if model.moe else 0
    return 2 * layers * kernels.exchange_ns(gpu, link, ep * message, ep, mode)
