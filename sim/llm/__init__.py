"""Language models as shapes: HF ``config.json`` to matrices, bytes and floating-point operations.

`config` reads a model, `shapes` lists its matrices and counts parameters and bytes, `lora` gives
adapter shapes and sizes, `kv` the KV cache, `moe` the expert traffic of a batch. Nothing here
knows of hardware or time.
"""

from plora.sim.llm.config import ModelConfig, MoeConfig, WeightsMode, bundled_models, load_model
from plora.sim.llm.kv import KvDtype, attended_tokens, kv_bytes, kv_bytes_per_token
from plora.sim.llm.lora import LoraTarget, adapter_bytes, lora_targets
from plora.sim.llm.moe import expected_distinct_experts
from plora.sim.llm.shapes import (
    Projection,
    active_parameters,
    decode_weight_bytes,
    parameters,
    projections,
    resident_weight_bytes,
)

__all__ = [
    "KvDtype",
    "LoraTarget",
    "ModelConfig",
    "MoeConfig",
    "Projection",
    "WeightsMode",
    "active_parameters",
    "adapter_bytes",
    "attended_tokens",
    "bundled_models",
    "decode_weight_bytes",
    "expected_distinct_experts",
    "kv_bytes",
    "kv_bytes_per_token",
    "load_model",
    "lora_targets",
    "parameters",
    "projections",
    "resident_weight_bytes",
]
