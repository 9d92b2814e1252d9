"""The matrices of a model, its parameter count, and the weight bytes that a step reads.

A projection of input width D1 and output width D2 is the matrix W (D1, D2) in y = x W, the
orientation of the paper, section II-A.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from plora.sim.llm.config import ModelConfig, WeightsMode
from plora.sim.llm.moe import expected_distinct_experts


@dataclass(frozen=True)
class Projection:
    """One weight matrix of a layer.

    `input_id` names the activation that it multiplies: projections with the same `input_id` share
    one x, so x is sent once for all of them. `experts` is the number of copies (1 unless routed).
    `bias` is the number of bias values per copy.
    """

    name: str
    input_dim: int
    output_dim: int
    input_id: str
    experts: int
    bias: int
    parameter_bytes: float

    @property
    def parameters(self) -> int:
        """Parameters of all copies, bias included."""
        return self.experts * (self.input_dim * self.output_dim + self.bias)

    @property
    def weight_bytes(self) -> float:
        """Bytes of all copies, bias included."""
        return self.parameters * self.parameter_bytes


def attention_projections(model: ModelConfig) -> tuple[Projection, ...]:
    """q, k, v and o; true shapes, so query width differs from hidden size where the model says so."""
    hidden, query, kv, size = model.hidden_size, model.query_width, model.kv_width, model.weight_bytes
    qkv_bias = int(model.qkv_bias)
    return (
        Projection("q", hidden, query, "attention_in", 1, qkv_bias * query, size),
        Projection("k", hidden, kv, "attention_in", 1, qkv_bias * kv, size),
        Projection("v", hidden, kv, "attention_in", 1, qkv_bias * kv, size),
        Projection("o", query, hidden, "attention_out", 1, int(model.o_bias) * hidden, size),
    )


def mlp_projections(model: ModelConfig, *, moe_layer: bool) -> tuple[Projection, ...]:
    """gate, up and down of one layer: dense, or routed experts and the shared expert's own three."""
    hidden, bias = model.hidden_size, int(model.mlp_bias)

    def gated(prefix: str, width: int, experts: int, size: float) -> tuple[Projection, ...]:
        return (
            Projection(f"{prefix}gate", hidden, width, "mlp_in", experts, bias * width, size),
            Projection(f"{prefix}up", hidden, width, "mlp_in", experts, bias * width, size),
            Projection(f"{prefix}down", width, hidden, f"{prefix}mlp_mid", experts, bias * hidden, size),
        )

    if not moe_layer or model.moe is None:
        return gated("", model.intermediate_size, 1, model.weight_bytes)
    moe = model.moe
    routed = gated("", moe.expert_intermediate_size, moe.num_experts, model.expert_weight_bytes)
    if not moe.shared_expert_intermediate_size:
        return routed
    return routed + gated("shared_", moe.shared_expert_intermediate_size, 1, model.weight_bytes)


def projections(model: ModelConfig, *, moe_layer: bool | None = None) -> tuple[Projection, ...]:
    """All projections of one layer. `moe_layer` defaults to whether the model has routed layers."""
    routed = model.moe is not None if moe_layer is None else moe_layer
    return attention_projections(model) + mlp_projections(model, moe_layer=routed)


def _router_parameters(model: ModelConfig) -> int:
    """Router of one mixture layer, with the shared expert's gate where there is one."""
    if model.moe is None:
        return 0
    bias = model.moe.num_experts if model.moe.router_bias else 0
    shared_gate = model.hidden_size if model.moe.shared_expert_intermediate_size else 0
    return model.hidden_size * model.moe.num_experts + bias + shared_gate


def _layer_extras(model: ModelConfig) -> int:
    """Parameters of one layer outside its projections and router: norms and attention sinks."""
    extras = 2 * model.hidden_size
    extras += 2 * model.head_dim if model.qk_norm else 0
    extras += model.num_attention_heads if model.attention_sinks else 0
    return extras


def layer_parameters(model: ModelConfig, *, moe_layer: bool | None = None) -> int:
    """Parameters of one layer, all experts included."""
    routed = model.moe is not None if moe_layer is None else moe_layer
    router = _router_parameters(model) if routed else 0
    return sum(p.parameters for p in projections(model, moe_layer=routed)) + router + _layer_extras(model)


def embedding_parameters(model: ModelConfig) -> int:
    """Parameters of the input embedding table."""
    return model.vocab_size * model.hidden_size


def parameters(model: ModelConfig) -> int:
    """Parameters of the whole model (checked against the published counts)."""
    moe_layers = model.moe.layers if model.moe else 0
    body = moe_layers * layer_parameters(model, moe_layer=True) if moe_layers else 0
    body += model.dense_layers * layer_parameters(model, moe_layer=False)
    tables = embedding_parameters(model) * (1 if model.tie_word_embeddings else 2)
    return body + tables + model.hidden_size


def _scaled(projection: Projection, copies: float) -> float:
    """Parameters of `copies` of the projection's copies."""
    return projection.parameters * copies / projection.experts


def active_parameters(model: ModelConfig, *, embedding: bool = True) -> float:
    """Parameters that one token uses: all but the experts it is not routed to.

    `embedding` counts the input table whole, as published "active" counts do.
    """
    total = float(parameters(model))
    if not embedding and not model.tie_word_embeddings:
        total -= embedding_parameters(model)
    if model.moe is None:
        return total
    for projection in mlp_projections(model, moe_layer=True):
        if projection.experts > 1:
            idle = projection.experts - model.moe.experts_per_token
            total -= model.moe.layers * _scaled(projection, idle)
    return total


def layer_weight_bytes(model: ModelConfig, *, moe_layer: bool | None = None, experts: float | None = None) -> float:
    """Bytes of one layer with `experts` of its routed experts (default: all), counted from the shapes."""
    routed = model.moe is not None if moe_layer is None else moe_layer
    total = 0.0
    for projection in projections(model, moe_layer=routed):
        copies = projection.experts if projection.experts == 1 or experts is None else experts
        total += _scaled(projection, copies) * projection.parameter_bytes
    rest = (_router_parameters(model) if routed else 0) + _layer_extras(model)
    return total + rest * model.weight_bytes


def head_weight_bytes(model: ModelConfig) -> float:
    """Bytes of the output head and the final norm, read once a step."""
    return (embedding_parameters(model) + model.hidden_size) * model.weight_bytes


def resident_weight_bytes(model: ModelConfig, weights: WeightsMode | None = None, *, expert_parallel: int = 1) -> float:
    """Bytes that the weights occupy in memory, both tables and all experts (or one share of them) included.

    ``nominal`` is 2 bytes per nominal parameter, the paper's 14, 26 and 16 GB; experts are not shared out there.
    """
    if (weights or model.weights) == "nominal" and model.nominal_parameters is not None:
        return 2.0 * model.nominal_parameters
    total = 0.0
    if model.moe is not None and model.moe.layers:
        kept = model.moe.num_experts / expert_parallel
        total = model.moe.layers * layer_weight_bytes(model, moe_layer=True, experts=kept)
    total += model.dense_layers * layer_weight_bytes(model, moe_layer=False)
    total += head_weight_bytes(model)
    return total + (0.0 if model.tie_word_embeddings else embedding_parameters(model) * model.weight_bytes)


def decode_weight_bytes(
    model: ModelConfig,
    batch: float,
    weights: WeightsMode | None = None,
    experts: Literal["expected", "active"] = "expected",
) -> float:
    """Weight bytes that one decode step of `batch` tokens reads.

    ``exact``: every layer and the head once; of the experts those that the batch is expected to
    touch (``expected``, uniform routing) or only one token's share (``active``); of the input table
    nothing (a step reads `batch` rows). ``nominal``: 2 bytes per nominal parameter; for a mixture
    with ``active`` 2 bytes per nominal active parameter, the paper's 6 GB for Qwen3-30B, and with
    ``expected`` that figure plus the nominal bytes of the further experts in proportion.
    """
    moe = model.moe
    touched: float | None = None
    if moe is not None:
        touched = (
            float(moe.experts_per_token)
            if experts == "active"
            else expected_distinct_experts(moe.num_experts, moe.experts_per_token, max(1.0, batch))
        )
    if (weights or model.weights) == "nominal" and model.nominal_parameters is not None:
        if moe is None or touched is None:
            return 2.0 * model.nominal_parameters
        active = model.nominal_active_parameters or model.nominal_parameters
        spread = (touched - moe.experts_per_token) / (moe.num_experts - moe.experts_per_token or 1)
        return 2.0 * (active + (model.nominal_parameters - active) * spread)
    moe_layers = moe.layers if moe else 0
    total = moe_layers * layer_weight_bytes(model, moe_layer=True, experts=touched) if moe_layers else 0.0
    return total + model.dense_layers * layer_weight_bytes(model, moe_layer=False) + head_weight_bytes(model)
