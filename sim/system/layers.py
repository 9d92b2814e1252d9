"""A model's layers as the work of one decode step: weights to stream, adapters to apply, KV to read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from plora.hw.defs.errors import UserError
from plora.sim.llm.config import ModelConfig, WeightsMode
from plora.sim.llm.kv import kv_bytes_per_token_layer
from plora.sim.llm.lora import AdapterShape, LoraScope, lora_targets
from plora.sim.llm.moe import expected_distinct_experts
from plora.sim.llm.shapes import (
    Projection,
    decode_weight_bytes,
    head_weight_bytes,
    layer_weight_bytes,
    projections,
)
from plora.sim.system.gputime import GpuTimes

ROW_PARALLEL = ("attention_out", "mlp_mid", "experts", "experts_mid")
"""Groups whose matrices are split by rows over GPUs, so that their outputs have to be summed."""

AdapterWave = Literal["sharded", "naive"]
"""How adapters follow tensor parallelism (the paper, section VIII, finding 5). ``naive``: as the base
weights, so that every GPU exchanges whole inputs or whole outputs with its pool. ``sharded``: A by
rows, an all-reduce of the rank-wide intermediate, B by columns."""


@dataclass(frozen=True)
class Group:
    """Matrices of one layer that multiply the same input x, which is therefore sent only once.

    Attributes:
        name: the activation they share.
        input_dim: D1, width of x.
        output_dims: D2 of each matrix that adapters touch; empty if none.
        experts: copies of each matrix, of which a token uses `used`: 1 and 1 unless routed.
        own_inputs: whether every (token, expert) pair has an input of its own (the experts' down
            projection) or all experts of a token share its x.
        weight_bytes: base weights that one pass of a batch reads.
        flops_per_token: of the base weights.
        base_ps: GPU time of the base weights for the batch.
    """

    name: str
    input_dim: int
    output_dims: tuple[int, ...]
    weight_bytes: int
    flops_per_token: float
    base_ps: int
    experts: int = 1
    used: int = 1
    own_inputs: bool = False

    def touched(self, rows: int) -> float:
        """Return how many copies of an adapter's matrices `rows` tokens are expected to use."""
        return 1.0 if self.experts == 1 else expected_distinct_experts(self.experts, self.used, rows)

    @property
    def inputs(self) -> int:
        """Inputs x of one token."""
        return self.used if self.own_inputs else 1

    @property
    def a_columns(self) -> int:
        """Values of all A matrices per unit of rank."""
        return self.input_dim * len(self.output_dims)

    @property
    def b_columns(self) -> int:
        """Values of all B matrices per unit of rank."""
        return sum(self.output_dims)


@dataclass(frozen=True)
class LayerKind:
    """Layers that do the same work.

    Attributes:
        count: how many there are.
        window: attended tokens at most, or None.
        before: groups before attention (q, k, v).
        after: groups after attention in order (o; gate and up; down).
        lora_groups: groups that adapters touch.
    """

    count: int
    window: int | None
    before: tuple[Group, ...]
    after: tuple[Group, ...]

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups in order."""
        return self.before + self.after

    @property
    def phases(self) -> int:
        """Parts of the layer that follow one another: its groups and attention."""
        return len(self.groups) + 1

    @property
    def lora_groups(self) -> tuple[Group, ...]:
        """Groups that adapters touch."""
        return tuple(group for group in self.groups if group.output_dims)


@dataclass(frozen=True)
class ModelWork:
    """What one decode step of a batch of a given size asks of the hardware, weights-wise.

    Attributes:
        kinds: the layers.
        hidden_size: width of the residual stream.
        head_bytes, head_flops_per_token, head_ps: the output head and the final norm, once a step.
        kv_token_bytes: keys and values of one token in one layer.
        query_bytes, partial_bytes: of one request and layer: q in FP16; partial O in FP16 with FP32
            anchors (m, l) per head.
        attention_flops_per_token: of one request, layer and attended token (QK^T and SV).
    """

    kinds: tuple[LayerKind, ...]
    hidden_size: int
    head_bytes: int
    head_flops_per_token: float
    head_ps: int
    kv_token_bytes: float
    query_bytes: int
    partial_bytes: int
    attention_flops_per_token: int

    @property
    def layers(self) -> int:
        """All layers."""
        return sum(kind.count for kind in self.kinds)

    @property
    def rank_bytes(self) -> int:
        """Bytes of an adapter's matrices on one GPU, and in its pool, per unit of rank."""
        return 2 * sum(k.count * g.experts * (g.a_columns + g.b_columns) for k in self.kinds for g in k.lora_groups)

    @property
    def token_bytes(self) -> float:
        """Keys and values of one token over all layers, on one GPU or in its pool."""
        return self.kv_token_bytes * self.layers

    @property
    def weight_bytes(self) -> int:
        """Weights that the step reads."""
        return sum(kind.count * sum(g.weight_bytes for g in kind.groups) for kind in self.kinds) + self.head_bytes


@dataclass(frozen=True)
class WorkOptions:
    """How the work of a step is counted; the defaults are those of the paper.

    Attributes:
        weights: as `plora.sim.llm.WeightsMode`; None leaves it to the model.
        experts: routed experts a batch reads: those it is ``expected`` to touch, or one token's
            ``active`` ones, the paper's idealisation.
        kv_dtype, kv_scales: type of the KV cache, and whether integer types carry scales.
        lora_scope, adapter_shape: which matrices adapters touch, and of what shape they are.
        adapter_wave: how adapters are split over several GPUs.
    """

    weights: WeightsMode | None = None
    experts: Literal["expected", "active"] = "expected"
    kv_dtype: str = "fp16"
    kv_scales: bool = False
    lora_scope: LoraScope = "all"
    adapter_shape: AdapterShape = "true"
    adapter_wave: AdapterWave = "sharded"


def _members(model: ModelConfig, moe_layer: bool, scope: LoraScope) -> dict[str, list[Projection]]:
    """Return the matrices of one layer by group, in order; experts are one fused kernel unless adapters touch them."""
    groups: dict[str, list[Projection]] = {}
    for projection in projections(model, moe_layer=moe_layer):
        name = projection.input_id
        if moe_layer and not name.startswith("attention"):
            last = "experts_mid" if name.endswith("mid") else "experts_in"
            name = last if scope == "all-experts" else "experts"
        groups.setdefault(name, []).append(projection)
    return groups


def _experts_touched(model: ModelConfig, tokens: int, experts: str) -> float:
    if model.moe is None:
        return 0.0
    if experts == "active":
        return float(model.moe.experts_per_token)
    return expected_distinct_experts(model.moe.num_experts, model.moe.experts_per_token, max(1, tokens))


def model_work(model: ModelConfig, tokens: int, times: GpuTimes, options: WorkOptions) -> ModelWork:
    """Return the work of a decode step of `tokens` tokens, as one of `times.gpus` GPUs sees it.

    Weight bytes of all GPUs add up to `plora.sim.llm.decode_weight_bytes`; where that counts nominal
    parameters, each group gets its exact share of them.

    Raises:
        UserError: adapters on routed experts beside a shared one, which this model does not cover, or
            heads that do not divide over the GPUs.
    """
    gpus = times.gpus
    if options.lora_scope == "all-experts" and model.moe and model.moe.shared_expert_intermediate_size:
        raise UserError(
            f"{model.name} has a shared expert: adapters on routed experts beside one are not covered; "
            "use lora_scope attention"
        )
    if model.num_attention_heads % gpus or (model.num_key_value_heads % gpus and gpus % model.num_key_value_heads):
        raise UserError(
            f"{model.name} has {model.num_attention_heads} query and {model.num_key_value_heads} key/value heads, "
            f"which do not divide over {gpus} GPUs; choose another number"
        )
    touched = _experts_touched(model, tokens, options.experts)
    total = decode_weight_bytes(model, tokens, options.weights, options.experts)
    moe_layers = model.moe.layers if model.moe else 0
    exact = head_weight_bytes(model) + model.dense_layers * layer_weight_bytes(model, moe_layer=False)
    if moe_layers:
        exact += moe_layers * layer_weight_bytes(model, moe_layer=True, experts=touched)
    scale = total / exact / gpus

    def group(name: str, members: list[Projection], moe_layer: bool) -> Group:
        targets = lora_targets(model, options.lora_scope, options.adapter_shape, moe_layer=moe_layer)
        mine = [t for t in targets if t.input_id == name.replace("experts", "mlp")]
        weight_bytes, flops = 0.0, 0.0
        for member in members:
            routed = member.experts > 1
            weight_bytes += member.weight_bytes * (touched if routed else 1) / member.experts
            used = model.moe.experts_per_token if routed and model.moe else 1
            flops += 2.0 * member.parameters / member.experts * used
        # Base weights: outputs of q, k, v, gate and up by column, inputs of o and down by row.
        by_row = name in ROW_PARALLEL
        sharded = options.adapter_wave == "sharded"
        width = mine[0].input_dim if mine else members[0].input_dim
        copies = mine[0].copies if mine else 1
        size = round(weight_bytes * scale)
        return Group(
            name=name,
            input_dim=-(-width // gpus) if by_row or sharded else width,
            output_dims=tuple(t.output_dim if by_row and not sharded else -(-t.output_dim // gpus) for t in mine),
            experts=copies,
            used=mine[0].copies_per_token if mine else 1,
            own_inputs=copies > 1 and by_row,
            weight_bytes=size,
            flops_per_token=flops / gpus,
            base_ps=times.base_ps(name, tokens, size, flops / gpus * tokens),
        )

    kinds = []
    for moe_layer, count in ((False, model.dense_layers), (True, moe_layers)):
        made = (
            [group(n, m, moe_layer) for n, m in _members(model, moe_layer, options.lora_scope).items()] if count else []
        )
        # Sliding and full attention alternate whatever the MLP is; only their number matters.
        sliding = round(count * model.sliding_layers / model.num_hidden_layers) if model.sliding_window else 0
        for window, number in ((None, count - sliding), (model.sliding_window, sliding)):
            if number:
                kinds.append(LayerKind(number, window, tuple(made[:1]), tuple(made[1:])))
    in_layers = sum(kind.count * sum(g.weight_bytes for g in kind.groups) for kind in kinds)
    head_bytes = round(total / gpus) - in_layers
    heads, kv_heads = model.num_attention_heads // gpus, max(1, model.num_key_value_heads // gpus)
    return ModelWork(
        kinds=tuple(kinds),
        hidden_size=model.hidden_size,
        head_bytes=head_bytes,
        head_flops_per_token=2.0 * model.vocab_size * model.hidden_size / gpus,
        head_ps=times.base_ps("head", tokens, head_bytes, 2.0 * model.vocab_size * model.hidden_size / gpus * tokens),
        kv_token_bytes=kv_bytes_per_token_layer(model, options.kv_dtype, scales=options.kv_scales)
        * kv_heads
        / model.num_key_value_heads,
        query_bytes=2 * heads * model.head_dim,
        partial_bytes=heads * (2 * model.head_dim + 8),
        attention_flops_per_token=4 * heads * model.head_dim,
    )


def base_times(
    work: ModelWork,
    model: ModelConfig,
    tokens: int,
    times: GpuTimes,
    options: WorkOptions,
    everyone: int | None = None,
) -> list[list[int]]:
    """Return the base times of every group of every kind of layer, as `work` of another number of tokens has them.

    `everyone` counts the tokens of all GPUs that share the experts.
    """
    if model.moe is not None and times.mode == "roofline":
        # The weights that a step reads depend on the experts that its tokens touch.
        work = model_work(model, tokens, times, options)
        return [[g.base_ps for g in kind.groups] for kind in work.kinds]
    return [
        [times.base_ps(g.name, tokens, g.weight_bytes, g.flops_per_token * tokens, everyone) for g in kind.groups]
        for kind in work.kinds
    ]
