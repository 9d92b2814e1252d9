"""The KV cache: bytes per token and what a decode step reads."""

from __future__ import annotations

from typing import Literal

from plora.hw.defs.errors import UserError
from plora.sim.llm.config import ModelConfig

KvDtype = Literal["fp16", "bf16", "int8", "int4"]

_ELEMENT_BYTES: dict[str, float] = {"fp16": 2.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5}
_SCALE_BYTES = 2
"""Per token, head, and K or V. The device has a byte for a key and one for each group of dims of a value."""


def kv_element_bytes(dtype: str) -> float:
    """Bytes of one stored key or value element; raises :class:`UserError` for an unknown type."""
    if dtype not in _ELEMENT_BYTES:
        raise UserError(f"unknown KV cache type {dtype!r}; known: {', '.join(_ELEMENT_BYTES)}")
    return _ELEMENT_BYTES[dtype]


def kv_bytes_per_token_layer(model: ModelConfig, dtype: str = "fp16", *, scales: bool = True) -> float:
    """Bytes of one token's keys and values in one layer.

    2 x heads x (head_dim x element bytes + scale); `scales` False leaves the scales of the integer
    types out, as the paper's compression figures do.
    """
    scale = _SCALE_BYTES if scales and dtype in ("int8", "int4") else 0
    return 2 * model.num_key_value_heads * (model.head_dim * kv_element_bytes(dtype) + scale)


def kv_bytes_per_token(model: ModelConfig, dtype: str = "fp16", *, scales: bool = True) -> float:
    """Bytes of one token's keys and values over all layers."""
    return model.num_hidden_layers * kv_bytes_per_token_layer(model, dtype, scales=scales)


def attended_tokens(model: ModelConfig, context: float) -> float:
    """Mean over layers of the tokens that one query attends to at `context` tokens of history.

    Layers with a sliding window attend to at most the window.
    """
    if not context >= 0:
        raise UserError(f"context is {context!r}; give a number of tokens of at least 0")
    if model.sliding_window is None:
        return context
    windowed = model.sliding_layers * min(context, model.sliding_window)
    return (windowed + (model.num_hidden_layers - model.sliding_layers) * context) / model.num_hidden_layers


def kv_bytes(model: ModelConfig, context: float, dtype: str = "fp16", *, scales: bool = True) -> float:
    """Bytes of keys and values that one request's decode step reads over all layers."""
    return attended_tokens(model, context) * kv_bytes_per_token(model, dtype, scales=scales)
