"""A model's dimensions, read from a HuggingFace ``config.json``.

Only architectures whose matrices are known here are accepted; any other is refused by name, because
a model of similar size with other shapes would give plausible and wrong times.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from plora.hw.defs.errors import UserError

_DATA = Path(__file__).parent / "data"

WeightsMode = Literal["nominal", "exact"]
"""How weight bytes are counted: 2 bytes per nominal parameter as the paper does, or from the shapes."""


@dataclass(frozen=True)
class MoeConfig:
    """The mixture-of-experts part of a model.

    `layers` is the number of layers whose MLP is a mixture; the others are dense. A shared expert
    of width 0 does not exist.
    """

    num_experts: int
    experts_per_token: int
    expert_intermediate_size: int
    shared_expert_intermediate_size: int
    layers: int
    router_bias: bool


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions of one decoder-only language model.

    `weight_bytes` is the size of one dense parameter and `expert_weight_bytes` that of one expert
    parameter (MXFP4: 4 bits and one 8-bit scale per 32 values, so 0.53125). `sliding_layers` of the
    layers attend to at most `sliding_window` tokens. `weights` says how weight bytes are counted
    unless a caller says otherwise.
    """

    name: str
    family: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool
    max_position_embeddings: int
    weight_bytes: float
    expert_weight_bytes: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    attention_sinks: bool
    moe: MoeConfig | None
    sliding_window: int | None
    sliding_layers: int
    nominal_parameters: float | None
    nominal_active_parameters: float | None
    weights: WeightsMode

    @property
    def query_width(self) -> int:
        """Width of all query heads together; differs from `hidden_size` for Qwen3-30B and gpt-oss."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_key_value_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Query heads per key/value head (G)."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def dense_layers(self) -> int:
        """Layers whose MLP is dense."""
        return self.num_hidden_layers - (self.moe.layers if self.moe else 0)


@dataclass(frozen=True)
class _Family:
    """What an architecture fixes that its ``config.json`` does not say."""

    architecture: str
    experts_key: str | None = None
    expert_width_key: str = "intermediate_size"
    qkv_bias: bool | None = False  # None: the key attention_bias decides
    o_bias: bool | None = False
    qk_norm: bool = False
    sinks: bool = False
    router_bias: bool = False
    expert_bias: bool = False


_FAMILIES: dict[str, _Family] = {
    "llama": _Family("LlamaForCausalLM", qkv_bias=None, o_bias=None),
    "mistral": _Family("MistralForCausalLM"),
    "mixtral": _Family("MixtralForCausalLM", experts_key="num_local_experts"),
    "qwen2": _Family("Qwen2ForCausalLM", qkv_bias=True),
    "qwen2_moe": _Family(
        "Qwen2MoeForCausalLM",
        experts_key="num_experts",
        expert_width_key="moe_intermediate_size",
        qkv_bias=True,
    ),
    "qwen3": _Family("Qwen3ForCausalLM", qkv_bias=None, o_bias=None, qk_norm=True),
    "qwen3_moe": _Family(
        "Qwen3MoeForCausalLM",
        experts_key="num_experts",
        expert_width_key="moe_intermediate_size",
        qkv_bias=None,
        o_bias=None,
        qk_norm=True,
    ),
    "gpt_oss": _Family(
        "GptOssForCausalLM",
        experts_key="num_local_experts",
        qkv_bias=None,
        o_bias=None,
        sinks=True,
        router_bias=True,
        expert_bias=True,
    ),
}

_DTYPE_BYTES = {"float16": 2.0, "bfloat16": 2.0, "float32": 4.0}
_MXFP4_BYTES = (4 + 8 / 32) / 8  # OCP microscaling: 32 four-bit values share one 8-bit scale


class _Keys:
    """Typed access to the keys of one ``config.json``; every failure names the file and the key."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self._raw = raw
        self.where = where

    def has(self, key: str) -> bool:
        return self._raw.get(key) is not None

    def integer(self, key: str, default: int | None = None, minimum: int = 1, maximum: int = 1 << 24) -> int:
        value = self._raw.get(key)
        if value is None:
            if default is not None:
                return default
            raise UserError(f"{self.where}: key {key!r} is missing; add it as in the model's published config.json")
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            shown = repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:37]}..."
            raise UserError(f"{self.where}: {key} is {shown}; give an integer of {minimum} to {maximum}")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        value = self._raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise UserError(f"{self.where}: {key} is {value!r}; give true or false")
        return value

    def text(self, key: str) -> str:
        value = self._raw.get(key)
        if not isinstance(value, str):
            raise UserError(f"{self.where}: {key} is {value!r}; give a string as in the model's published config.json")
        return value

    def items(self, key: str) -> list[Any]:
        value = self._raw.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise UserError(f"{self.where}: {key} is {value!r}; give a list")
        return value

    def table(self, key: str) -> dict[str, Any]:
        value = self._raw.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise UserError(f"{self.where}: {key} is {value!r}; give an object")
        return value


def bundled_models() -> tuple[str, ...]:
    """Short names of the models that come with the project, sorted."""
    return tuple(sorted(path.stem for path in _DATA.glob("*.json")))


def load_model(model: str | Path, weights: WeightsMode | None = None) -> ModelConfig:
    """Read a model by short name, or from a ``config.json`` or a folder that holds one.

    `weights` overrides how weight bytes are counted; the default is ``exact`` for a user's file
    and what the bundled file says (``nominal`` for the paper's models) otherwise. Raises
    :class:`UserError` for an unknown name, an unreadable file, an unsupported architecture, and
    missing or contradictory keys.
    """
    path = Path(model)
    bundled = _DATA / f"{model}.json"
    if str(model) in bundled_models():
        path, name = bundled, str(model)
    elif os.path.isdir(path):
        path, name = path / "config.json", path.name
    else:
        name = path.stem
        if not os.path.exists(path) and path.suffix != ".json":
            raise UserError(
                f"unknown model {str(model)!r}; give the path of a config.json or one of: {', '.join(bundled_models())}"
            )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give a config.json or one of: {', '.join(bundled_models())}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); check the file and its permissions") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); mend the file") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: holds a {type(raw).__name__}; give a JSON object as HuggingFace publishes it")
    return parse_model(raw, name=name, where=path.name if path == bundled else str(path), weights=weights)


def parse_model(
    raw: Mapping[str, Any], *, name: str, where: str = "config.json", weights: WeightsMode | None = None
) -> ModelConfig:
    """Build a :class:`ModelConfig` from the parsed ``config.json`` `raw`; see :func:`load_model`."""
    keys = _Keys(raw, where)
    family_name, family = _family(keys)
    hidden = keys.integer("hidden_size")
    layers = keys.integer("num_hidden_layers")
    heads = keys.integer("num_attention_heads")
    kv_heads = keys.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise UserError(
            f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}; mend one"
        )
    if not keys.has("head_dim") and hidden % heads:
        raise UserError(
            f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}; mend one or give head_dim"
        )
    dense_bytes, expert_bytes = _weight_bytes(keys, family_name)
    window, sliding_layers = _sliding(keys, family_name, layers)
    attention_bias = keys.boolean("attention_bias", False)
    nominal, nominal_active, stated = _nominal(keys)
    mode = weights or stated
    if mode not in ("nominal", "exact"):
        raise UserError(f"{where}: weights is {mode!r}; give 'nominal' or 'exact'")
    if mode == "nominal" and nominal is None:
        raise UserError(f"{where}: weights 'nominal' needs plora.nominal_parameters; add it or use weights 'exact'")
    model = ModelConfig(
        name=name,
        family=family_name,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=keys.integer("head_dim", default=max(1, hidden // heads)),
        intermediate_size=keys.integer("intermediate_size"),
        vocab_size=keys.integer("vocab_size"),
        tie_word_embeddings=keys.boolean("tie_word_embeddings", False),
        max_position_embeddings=keys.integer("max_position_embeddings", default=2048, maximum=1 << 40),
        weight_bytes=dense_bytes,
        expert_weight_bytes=expert_bytes,
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=family.expert_bias or keys.boolean("mlp_bias", False),
        qk_norm=family.qk_norm,
        attention_sinks=family.sinks,
        moe=_moe(keys, family, layers),
        sliding_window=window,
        sliding_layers=sliding_layers,
        nominal_parameters=nominal,
        nominal_active_parameters=nominal_active,
        weights=mode,
    )
    _check_size(model, where)
    return model


_MOST_PARAMETERS = 10**15
"""A thousand times the largest models; times of larger ones would leave 64-bit picoseconds."""


def _check_size(model: ModelConfig, where: str) -> None:
    mlp = model.intermediate_size
    if model.moe is not None:
        mlp = max(mlp, model.moe.num_experts * model.moe.expert_intermediate_size)
    widths = 3 * mlp + 2 * (model.query_width + model.kv_width)
    count = model.hidden_size * (model.num_hidden_layers * widths + model.vocab_size)
    if count > _MOST_PARAMETERS:
        raise UserError(f"{where}: describes a model of {count:.1e} parameters; at most 1e15 are covered")


def _family(keys: _Keys) -> tuple[str, _Family]:
    model_type = keys.text("model_type")
    known = ", ".join(sorted(_FAMILIES))
    if model_type not in _FAMILIES:
        raise UserError(f"{keys.where}: model_type {model_type!r} is not covered; covered are: {known}")
    family = _FAMILIES[model_type]
    architectures = keys.items("architectures")
    if architectures and architectures != [family.architecture]:
        raise UserError(
            f"{keys.where}: architectures {architectures!r} is not covered for model_type {model_type!r}; "
            f"covered is {family.architecture} (families: {known})"
        )
    return model_type, family


def _weight_bytes(keys: _Keys, family: str) -> tuple[float, float]:
    """Bytes per dense and per expert parameter."""
    dtype_key = "torch_dtype" if keys.has("torch_dtype") else "dtype"
    dtype = keys.text(dtype_key) if keys.has(dtype_key) else "bfloat16"
    if dtype not in _DTYPE_BYTES:
        raise UserError(
            f"{keys.where}: {dtype_key} {dtype!r} is not covered; covered: {', '.join(sorted(_DTYPE_BYTES))}"
        )
    dense = _DTYPE_BYTES[dtype]
    quantization = keys.table("quantization_config")
    if not quantization:
        return dense, dense
    method = quantization.get("quant_method")
    if method == "mxfp4" and family == "gpt_oss":
        return dense, _MXFP4_BYTES
    raise UserError(
        f"{keys.where}: quant_method {method!r} is not covered for {family}; covered is mxfp4 experts of gpt_oss, "
        "or remove quantization_config to model the unquantized weights"
    )


def _moe(keys: _Keys, family: _Family, layers: int) -> MoeConfig | None:
    if family.experts_key is None:
        return None
    experts = keys.integer(family.experts_key)
    per_token = keys.integer("num_experts_per_tok")
    if per_token > experts:
        raise UserError(
            f"{keys.where}: num_experts_per_tok {per_token} exceeds {family.experts_key} {experts}; mend one of them"
        )
    step = keys.integer("decoder_sparse_step", default=1)
    dense = set(keys.items("mlp_only_layers"))
    if not all(isinstance(layer, int) and 0 <= layer < layers for layer in dense):
        raise UserError(f"{keys.where}: mlp_only_layers {sorted(map(str, dense))} must be layer numbers below {layers}")
    # the rule of the Qwen MoE models: every `step`-th layer is a mixture unless listed as dense
    moe_layers = sum(1 for layer in range(layers) if layer not in dense and (layer + 1) % step == 0)
    return MoeConfig(
        num_experts=experts,
        experts_per_token=per_token,
        expert_intermediate_size=keys.integer(family.expert_width_key),
        shared_expert_intermediate_size=keys.integer("shared_expert_intermediate_size", default=0, minimum=0),
        layers=moe_layers,
        router_bias=family.router_bias,
    )


def _sliding(keys: _Keys, family: str, layers: int) -> tuple[int | None, int]:
    """Window in tokens and the number of layers that use it."""
    if not keys.has("sliding_window"):
        return None, 0
    window = keys.integer("sliding_window", maximum=1 << 40)
    kinds = keys.items("layer_types")
    if kinds:
        if len(kinds) != layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
            raise UserError(
                f"{keys.where}: layer_types must list sliding_attention or full_attention for each of {layers} layers"
            )
        count = kinds.count("sliding_attention")
    elif family.startswith("qwen"):
        # Qwen's convention: layers from max_window_layers on are windowed, and only if enabled
        enabled = keys.boolean("use_sliding_window", False)
        count = max(0, layers - keys.integer("max_window_layers", default=layers, minimum=0)) if enabled else 0
    elif family == "gpt_oss":
        count = (layers + 1) // 2
    else:
        count = layers
    return (window, count) if count else (None, 0)


def _nominal(keys: _Keys) -> tuple[float | None, float | None, WeightsMode]:
    """The project's own facts, under the key ``plora`` that a user's file may also carry."""
    table = keys.table("plora")
    known = {
        "source",
        "nominal_parameters",
        "nominal_active_parameters",
        "nominal_source",
        "published_parameters",
        "weights",
    }
    unknown = set(table) - known
    if unknown:
        raise UserError(f"{keys.where}: unknown key plora.{min(unknown)}; known: {', '.join(sorted(known))}")

    def count(key: str) -> float | None:
        value = table.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise UserError(f"{keys.where}: plora.{key} is {value!r}; give a positive number")
        return float(value)

    return count("nominal_parameters"), count("nominal_active_parameters"), table.get("weights", "exact")
