"""Adapter shapes and sizes.

For W (D1, D2) an adapter of rank R holds A (D1, R) and B (R, D2); y = x A B (the paper, section II-A).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from plora.hw.defs.errors import UserError
from plora.sim.llm.config import ModelConfig
from plora.sim.llm.shapes import attention_projections, mlp_projections

AdapterShape = Literal["true", "square"]
"""``true``: the model's own D1 x D2. ``square``: hidden x hidden for all seven matrices, the
reconstruction that gives the paper's 91 GB of cached matrices (section VII-D)."""

LoraScope = Literal["all", "attention", "all-experts"]
"""``all``: every projection of a dense model, attention only where the MLP is a mixture;
``attention``: q, k, v, o; ``all-experts``: every projection of every expert."""


@dataclass(frozen=True)
class LoraTarget:
    """One injected matrix of one layer.

    `input_id` names the activation: targets with the same `input_id` share one x. `copies` counts
    expert copies, of which a token uses `copies_per_token`.
    """

    name: str
    input_dim: int
    output_dim: int
    input_id: str
    copies: int
    copies_per_token: int


def lora_targets(
    model: ModelConfig,
    scope: LoraScope = "all",
    shape: AdapterShape = "true",
    *,
    moe_layer: bool | None = None,
) -> tuple[LoraTarget, ...]:
    """The matrices of one layer that an adapter touches; `moe_layer` as for `projections`.

    A mixture gets attention-only adapters unless `scope` is ``all-experts``: rank 49.6 on all 128
    experts of Qwen3-30B would be 5.2 GB an adapter. Raises :class:`UserError` for an unknown scope
    or shape.
    """
    if scope not in ("all", "attention", "all-experts"):
        raise UserError(f"unknown LoRA scope {scope!r}; known: all, attention, all-experts")
    if shape not in ("true", "square"):
        raise UserError(f"unknown adapter shape {shape!r}; known: true, square")
    found = list(attention_projections(model))
    if scope == "all-experts" or (scope == "all" and model.moe is None):
        found += mlp_projections(model, moe_layer=model.moe is not None if moe_layer is None else moe_layer)
    per_token = model.moe.experts_per_token if model.moe else 1
    targets = (
        LoraTarget(p.name, p.input_dim, p.output_dim, p.input_id, p.experts, per_token if p.experts > 1 else 1)
        for p in found
    )
    if shape == "true":
        return tuple(targets)
    side = model.hidden_size
    return tuple(LoraTarget(t.name, side, side, t.input_id, t.copies, t.copies_per_token) for t in targets)


def adapter_bytes(
    model: ModelConfig,
    rank: float,
    *,
    part: Literal["A", "B", "AB"] = "AB",
    scope: LoraScope = "all",
    shape: AdapterShape = "true",
    element_bytes: float = 2.0,
) -> float:
    """Bytes of one adapter (or of its A or B matrices) over all layers. `rank` may be a mean.

    Raises :class:`UserError` for a rank that is not positive.
    """
    if not rank > 0:
        raise UserError(f"adapter rank is {rank!r}; give a positive number")

    def layer_width(moe_layer: bool) -> int:
        return sum(
            target.copies * (target.input_dim * ("A" in part) + target.output_dim * ("B" in part))
            for target in lora_targets(model, scope, shape, moe_layer=moe_layer)
        )

    width = model.dense_layers * layer_width(False)
    if model.moe is not None:
        width += model.moe.layers * layer_width(True)
    return width * rank * element_bytes
