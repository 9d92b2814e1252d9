"""A decoder-only language model with an adapter, in numpy and float64, written to be read.

Covers the llama and qwen3_moe families as transformers defines them: RMS norm before each block, rotary
embedding by halves, grouped-query attention, SiLU-gated MLP, and for qwen3_moe a norm of each head's
query and key and a top-k mixture of experts. There is no cache: every call computes the whole prompt. Attention may be
done elsewhere (`Attention`), everything else is done here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from plora.hw.defs.errors import UserError
from plora.sw.adapters import Adapter, LoraModule
from plora.sw.adapters.tensors import read_tensors

Float64 = npt.NDArray[np.float64]
Attention = Callable[[int, Float64, Float64, Float64], Float64]
"""Causal attention of a whole prompt: from a layer's number, queries (tokens, heads, head_dim), and keys and values
(tokens, kv_heads, head_dim), the first two rotated by position, to (tokens, heads, head_dim)."""

_COVERED = {
    "model_type": ("llama", "qwen3_moe"),
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "sliding_window": (None,),
    "tie_word_embeddings": (False,),
}
"""Values of ``config.json`` for which this model is right; an absent key counts as null."""


@dataclass(frozen=True)
class Decoder:
    """A base model: its ``config.json`` as it is, and its tensors by name in float64. Made by `load_decoder`."""

    config: dict[str, Any]
    weights: dict[str, Float64]

    def logits(
        self, token_ids: list[int], adapter: Adapter | None = None, attention: Attention | None = None
    ) -> Float64:
        """Return the logits behind the last of ``token_ids``, shape (vocabulary,).

        ``attention``: done instead of that of this module.
        """
        return _Pass(self, adapter, attention or _causal_attention).logits(token_ids)


def load_decoder(folder: Path) -> Decoder:
    """Read a model from a folder with ``config.json`` and ``model.safetensors``.

    Raises:
        UserError: a file is unreadable, or the model is of a kind that is not covered.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    for key, covered in _COVERED.items():
        if config.get(key) not in covered:
            raise UserError(f"{path}: {key} is {config.get(key)!r}; covered are {', '.join(map(repr, covered))}")
    if config.get("rope_parameters", {}).get("rope_type") != "default":
        raise UserError(
            f"{path}: rope_parameters are {config.get('rope_parameters')!r}; covered is rope_type 'default'"
        )
    tensors = read_tensors(folder / "model.safetensors")
    return Decoder(config, {name: tensor.values.astype(np.float64) for name, tensor in tensors.items()})


class _Pass:
    """One forward pass: the model, with the adapter's tensors in place of its own."""

    def __init__(self, model: Decoder, adapter: Adapter | None, attention: Attention) -> None:
        self._config = model.config
        self._attend = attention
        saved = {name: values.astype(np.float64) for name, values in adapter.saved.items()} if adapter else {}
        self._weights = model.weights | saved
        self._modules = {(m.name, m.expert): m for m in adapter.modules} if adapter else {}

    def logits(self, token_ids: list[int]) -> Float64:
        hidden = self._weights["model.embed_tokens.weight"][token_ids]
        for layer in range(self._config["num_hidden_layers"]):
            path = f"model.layers.{layer}"
            normed = self._norm(f"{path}.input_layernorm", hidden)
            hidden = hidden + self._attention(layer, f"{path}.self_attn", normed)
            normed = self._norm(f"{path}.post_attention_layernorm", hidden)
            hidden = hidden + self._mlp(f"{path}.mlp", normed)
        return np.asarray(self._linear("lm_head", self._norm("model.norm", hidden[-1:]))[0])

    def _linear(self, name: str, x: Float64) -> Float64:
        return self._product(x, self._weights[f"{name}.weight"], self._modules.get((name, None)))

    @staticmethod
    def _product(x: Float64, weight: Float64, module: LoraModule | None) -> Float64:
        y = x @ weight.T
        if module is None:
            return y
        a, b = module.a.astype(np.float64), module.b.astype(np.float64) * module.scaling
        y = y + (x @ a.T) @ b.T
        if module.magnitude is not None:
            y = y * (module.magnitude / np.linalg.norm(weight + b @ a, axis=1))
        return y if module.bias is None else y + module.scaling * module.bias

    def _norm(self, name: str, x: Float64) -> Float64:
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        return np.asarray(x / np.sqrt(mean_square + self._config["rms_norm_eps"]) * self._weights[f"{name}.weight"])

    def _attention(self, layer: int, path: str, x: Float64) -> Float64:
        config = self._config
        heads, kv_heads, width = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        tokens = x.shape[0]
        q = self._linear(f"{path}.q_proj", x).reshape(tokens, heads, width)
        k = self._linear(f"{path}.k_proj", x).reshape(tokens, kv_heads, width)
        v = self._linear(f"{path}.v_proj", x).reshape(tokens, kv_heads, width)
        if f"{path}.q_norm.weight" in self._weights:
            q, k = self._norm(f"{path}.q_norm", q), self._norm(f"{path}.k_norm", k)
        mixed = self._attend(layer, self._rotate(q), self._rotate(k), v)
        return self._linear(f"{path}.o_proj", mixed.reshape(tokens, heads * width))

    def _rotate(self, x: Float64) -> Float64:
        half = x.shape[-1] // 2
        theta = self._config["rope_parameters"]["rope_theta"]
        angles = np.arange(x.shape[0])[:, None] * theta ** (-np.arange(half) / half)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        first, second = x[..., :half], x[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def _mlp(self, path: str, x: Float64) -> Float64:
        if f"{path}.gate.weight" in self._weights:
            return self._mixture(path, x)
        gate, up = self._linear(f"{path}.gate_proj", x), self._linear(f"{path}.up_proj", x)
        return self._linear(f"{path}.down_proj", _silu(gate) * up)

    def _mixture(self, path: str, x: Float64) -> Float64:
        config = self._config
        shares = _softmax(self._linear(f"{path}.gate", x))
        y = np.zeros_like(x)
        for token in range(x.shape[0]):
            chosen = np.argsort(-shares[token], kind="stable")[: config["num_experts_per_tok"]]
            total = shares[token, chosen].sum() if config["norm_topk_prob"] else 1.0
            for expert in chosen:
                y[token] += shares[token, expert] / total * self._expert(path, int(expert), x[token : token + 1])[0]
        return y

    def _expert(self, path: str, expert: int, x: Float64) -> Float64:
        weight = {
            name: self._weights[f"{path}.experts.{expert}.{name}.weight"]
            for name in ("gate_proj", "up_proj", "down_proj")
        }
        fused = np.concatenate([weight["gate_proj"], weight["up_proj"]])
        lora = {name: self._modules.get((f"{path}.experts.{name}", expert)) for name in ("gate_up_proj", "down_proj")}
        gate, up = np.split(self._product(x, fused, lora["gate_up_proj"]), 2, axis=-1)
        return self._product(_silu(gate) * up, weight["down_proj"], lora["down_proj"])


def _causal_attention(layer: int, q: Float64, k: Float64, v: Float64) -> Float64:
    tokens, heads, width = q.shape
    k, v = (np.repeat(each, heads // k.shape[1], axis=1) for each in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(width)
    scores[:, np.triu(np.ones((tokens, tokens), dtype=bool), 1)] = -np.inf
    return np.asarray(np.einsum("hqk,khd->qhd", _softmax(scores), v))


def _softmax(scores: Float64) -> Float64:
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def _silu(x: Float64) -> Float64:
    return np.asarray(x / (1 + np.exp(-x)))
