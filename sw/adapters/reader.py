"""From the tensors of a PEFT adapter to pairs of matrices by module."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from plora.hw.defs.errors import UserError
from plora.sw.adapters.config import AdapterConfig, read_config
from plora.sw.adapters.tensors import Float32, Tensor, model_file, read_tensors

PREFIX = "base_model.model."
_WRAPPED = ".base_layer"

# What stands behind a module's path in a tensor's name.
_PARTS = (
    (re.compile(r"(.+)\.lora_(A|B)\.weight"), "pair"),
    (re.compile(r"(.+)\.lora_embedding_(A|B)"), "embedding"),
    (re.compile(r"(.+)\.lora_B\.bias()"), "bias"),
    (re.compile(r"(.+)\.lora_magnitude_vector(?:\.weight)?()"), "magnitude"),
    (re.compile(r"(.+\.trainable_tokens_delta)()"), "saved"),
)

# Fused experts: the order in which transformers declares the parameters of an experts module. PEFT wraps
# the first of them first, so it lies deepest (most often ``.base_layer``) in the names.
EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")


@dataclass(frozen=True)
class LoraModule:
    """One pair of matrices: y += scaling * (x A^T) B^T, in float32 as stored."""

    name: str
    """Path of the module (or parameter) in the base model."""
    expert: int | None
    """Index of the expert, for a fused parameter of all experts."""
    a: Float32
    """R x K."""
    b: Float32
    """N x R, not scaled."""
    alpha: float
    scaling: float
    dtype: str
    """Type in which it is stored, by safetensors' name."""
    magnitude: Float32 | None = None
    """DoRA: the norm of every row of the changed weight. The GPU applies it."""
    bias: Float32 | None = None
    """Added to the result, scaled. The GPU adds it."""

    @property
    def rank(self) -> int:
        """R."""
        return int(self.a.shape[0])

    @property
    def in_features(self) -> int:
        """K."""
        return int(self.a.shape[1])

    @property
    def out_features(self) -> int:
        """N."""
        return int(self.b.shape[0])

    @property
    def label(self) -> str:
        """Name for tables and for choosing modules: the path, with the expert where there is one."""
        return self.name if self.expert is None else f"{self.name}[{self.expert}]"


@dataclass(frozen=True)
class HostPart:
    """A part of an adapter that the device does not compute; without it the adapter's result is wrong."""

    name: str
    """Path of the module."""
    what: str
    """What it is, and whose work it is."""


@dataclass(frozen=True)
class Adapter:
    """An adapter as read."""

    name: str
    config: AdapterConfig
    modules: tuple[LoraModule, ...]
    """In the order of their names, numbers as numbers."""
    host_parts: tuple[HostPart, ...]
    saved: Mapping[str, Float32] = field(default_factory=dict)
    """Whole tensors that replace those of the base model, by their name in it."""
    embeddings: Mapping[str, tuple[Float32, Float32]] = field(default_factory=dict)
    """LoRA of embedding tables: A (R x vocabulary) and B (width x R) by module."""


def read_adapter(folder: Path) -> Adapter:
    """Read the PEFT adapter in ``folder``.

    Raises:
        UserError: a file is missing, unreadable or damaged; the adapter is of a kind that the device does
            not compute; tensors are missing, do not fit each other, or do not fit the configuration.
    """
    config = read_config(folder)
    path = model_file(folder)
    return assemble(folder.resolve().name, config, read_tensors(path), str(path))


@dataclass
class _Module:
    """Tensors of one module so far."""

    pair: dict[str, Tensor] = field(default_factory=dict)
    magnitude: Tensor | None = None
    bias: Tensor | None = None


def assemble(name: str, config: AdapterConfig, tensors: Mapping[str, Tensor], where: str) -> Adapter:
    """Sort ``tensors`` into modules and check them against ``config``; see `read_adapter`."""
    found: dict[str, _Module] = defaultdict(_Module)
    embeddings: dict[str, dict[str, Float32]] = defaultdict(dict)
    saved: dict[str, Float32] = {}
    for key, tensor in tensors.items():
        if not key.startswith(PREFIX):
            raise UserError(f"{where}: tensor {key} does not start with {PREFIX}: save the adapter with PEFT")
        kind, module, part = _classify(key.removeprefix(PREFIX), where)
        if kind == "pair":
            found[module].pair[part] = tensor
        elif kind == "embedding":
            embeddings[module][part] = tensor.values
        elif kind == "bias":
            found[module].bias = tensor
        elif kind == "magnitude":
            found[module].magnitude = tensor
        else:
            saved[module] = tensor.values
    modules: list[LoraModule] = []
    for path, levels in _levels(found, where).items():
        modules += _of_module(path, levels, config, where)
    modules.sort(key=lambda module: (_natural(module.name), module.expert or 0))
    if not modules:
        raise UserError(f"{where}: holds no pair of LoRA matrices for a linear layer: nothing for the device to do")
    pairs = {path: _embedding_pair(path, parts, config, where) for path, parts in embeddings.items()}
    _check_targets(config, modules, pairs, saved, where)
    return Adapter(name, config, tuple(modules), _host_parts(config, modules, pairs, saved), saved, pairs)


def _classify(key: str, where: str) -> tuple[str, str, str]:
    for expression, kind in _PARTS:
        match = expression.fullmatch(key)
        if match:
            return kind, match[1], match[2]
    if "lora_" in key or not key.endswith((".weight", ".bias")):
        raise UserError(f"{where}: tensor {key} is of a kind that is not known: the adapter is no plain LoRA")
    return "saved", key, ""


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that has layer 2 before layer 10."""
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in name.split(".")]


def _levels(found: Mapping[str, _Module], where: str) -> dict[str, list[_Module]]:
    """Group by module path the wrappers that lie in each other, the outermost first."""
    levels: dict[str, dict[int, _Module]] = defaultdict(dict)
    for key, module in found.items():
        path, depth = key, 0
        while path.endswith(_WRAPPED):
            path, depth = path.removesuffix(_WRAPPED), depth + 1
        levels[path][depth] = module
    for path, by_depth in levels.items():
        if sorted(by_depth) != list(range(len(by_depth))):
            raise UserError(f"{where}: {path} lacks the tensors of an inner or outer parameter: the file is incomplete")
    return {path: [by_depth[depth] for depth in sorted(by_depth)] for path, by_depth in levels.items()}


def _of_module(path: str, levels: list[_Module], config: AdapterConfig, where: str) -> list[LoraModule]:
    parameters = config.parameters_in(path)
    if len(levels) == 1 and (not parameters or (config.target_modules is not None and config.targets_module(path))):
        return [_module(path, levels[0], config, where)]
    if len(levels) != len(parameters):
        raise UserError(
            f"{where}: {path} has LoRA matrices for {len(levels)} parameters, but target_parameters names"
            f" {', '.join(parameters) or 'none'} of it; mend {config.where}"
        )
    if len(parameters) > 1 and not set(parameters) <= set(EXPERT_PARAMETERS):
        raise UserError(
            f"{where}: cannot tell which matrices of {path} belong to {' and which to '.join(parameters)}: known are"
            f" {', '.join(EXPERT_PARAMETERS)}"
        )
    order = [name for name in EXPERT_PARAMETERS if name in parameters] if len(parameters) > 1 else list(parameters)
    modules = []
    for parameter, level in zip(reversed(order), levels, strict=True):
        modules += _experts(f"{path}.{parameter}", level, config, where)
    return modules


def _matrices(path: str, module: _Module, where: str) -> tuple[Tensor, Tensor]:
    missing = {"A", "B"} - module.pair.keys()
    if missing:
        raise UserError(f"{where}: {path} has no lora_{min(missing)} tensor: the file is incomplete")
    a, b = module.pair["A"], module.pair["B"]
    shapes = f"{path} has lora_A of shape {list(a.values.shape)} and lora_B of {list(b.values.shape)}"
    if a.values.ndim != 2 or b.values.ndim != 2 or 0 in a.values.shape or 0 in b.values.shape:
        raise UserError(f"{where}: {shapes}: the device takes linear layers, whose two are matrices")
    if a.values.shape[0] != b.values.shape[1]:
        raise UserError(f"{where}: {shapes}: rows of A must be columns of B")
    return a, b


def _module(path: str, module: _Module, config: AdapterConfig, where: str) -> LoraModule:
    a, b = _matrices(path, module, where)
    rank = config.rank_of(path)
    if a.values.shape[0] != rank:
        raise UserError(
            f"{where}: {path} has rank {a.values.shape[0]}, but {config.where} says {rank}; mend one of them"
        )
    vectors = (
        ("lora_magnitude_vector", module.magnitude, "use_dora", config.use_dora),
        ("lora_B.bias", module.bias, "lora_bias", config.lora_bias),
    )
    for what, vector, key, expected in vectors:
        if (vector is not None) != expected:
            has = "no" if vector is None else "a"
            raise UserError(f"{where}: {path} has {has} {what}, but {config.where} says {key} {str(expected).lower()}")
        if vector is not None and vector.values.size != b.values.shape[0]:
            raise UserError(
                f"{where}: {path} has {what} of shape {list(vector.values.shape)}; it needs {b.values.shape[0]} values"
            )
    return LoraModule(
        name=path,
        expert=None,
        a=a.values,
        b=b.values,
        alpha=config.alpha_of(path),
        scaling=config.scaling_of(path),
        dtype=a.dtype if a.dtype == b.dtype else f"{a.dtype}/{b.dtype}",
        magnitude=None if module.magnitude is None else module.magnitude.values.reshape(-1),
        bias=None if module.bias is None else module.bias.values.reshape(-1),
    )


def _experts(path: str, module: _Module, config: AdapterConfig, where: str) -> list[LoraModule]:
    """Take apart the matrices of all experts: A has the rows of one expert after the other; B has, for each
    rank, a column of every expert (PEFT, ParamWrapper)."""
    a, b = _matrices(path, module, where)
    if module.magnitude is not None or module.bias is not None:
        raise UserError(f"{where}: {path} has a magnitude or bias, which expert parameters do not have")
    rank = config.rank_of(path)
    experts, rest = divmod(a.values.shape[0], rank)
    if rest or not experts:
        raise UserError(
            f"{where}: {path} has {a.values.shape[0]} rows in lora_A, no multiple of its rank {rank}; mend"
            f" {config.where}"
        )
    a_parts = a.values.reshape(experts, rank, -1)
    b_parts = b.values.reshape(-1, rank, experts)
    return [
        LoraModule(
            name=path,
            expert=expert,
            a=np.ascontiguousarray(a_parts[expert]),
            b=np.ascontiguousarray(b_parts[:, :, expert]),
            alpha=config.alpha_of(path),
            scaling=config.scaling_of(path),
            dtype=a.dtype if a.dtype == b.dtype else f"{a.dtype}/{b.dtype}",
        )
        for expert in range(experts)
    ]


def _embedding_pair(
    path: str, parts: Mapping[str, Float32], config: AdapterConfig, where: str
) -> tuple[Float32, Float32]:
    missing = {"A", "B"} - parts.keys()
    if missing:
        raise UserError(f"{where}: {path} has no lora_embedding_{min(missing)} tensor: the file is incomplete")
    a, b = parts["A"], parts["B"]
    rank = config.rank_of(path)
    if a.ndim != 2 or b.ndim != 2 or not a.shape[0] == b.shape[1] == rank:
        raise UserError(
            f"{where}: {path} has embedding matrices of shapes {list(a.shape)} and {list(b.shape)}, but rank {rank}"
        )
    return a, b


def _check_targets(
    config: AdapterConfig,
    modules: list[LoraModule],
    embeddings: Mapping[str, object],
    saved: Mapping[str, object],
    where: str,
) -> None:
    """Hold the modules found against those that the configuration names, both ways."""
    plain = [module.name for module in modules if module.expert is None] + list(embeddings)
    for path in plain:
        if not config.targets_module(path) and not config.parameters_in(path.rpartition(".")[0]):
            raise UserError(f"{where}: {path} has LoRA matrices, but target_modules in {config.where} does not name it")
    if isinstance(config.target_modules, tuple):
        for target in config.target_modules:
            if not any(path == target or path.endswith(f".{target}") for path in plain):
                raise UserError(
                    f"{where}: holds nothing for target module {target!r}: the file is incomplete, or {config.where} is"
                    " of another adapter"
                )
    for target in config.modules_to_save:
        if not any(f".{target}." in f".{name}" for name in saved):
            raise UserError(f"{where}: holds nothing for {target!r} of modules_to_save: the file is incomplete")
    names = {module.name for module in modules}
    for target in config.target_parameters:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise UserError(f"{where}: holds nothing for target parameter {target!r}: the file is incomplete")


def _host_parts(
    config: AdapterConfig,
    modules: list[LoraModule],
    embeddings: Mapping[str, object],
    saved: Mapping[str, object],
) -> tuple[HostPart, ...]:
    parts = [
        HostPart(name, "whole tensor beside the LoRA matrices: the GPU uses it in place of, or with, the base model's")
        for name in saved
    ]
    parts += [HostPart(name, "LoRA of an embedding table: the GPU looks rows up in it") for name in embeddings]
    for module in modules:
        if module.magnitude is not None:
            parts.append(HostPart(module.label, "DoRA magnitude: the GPU scales base result and x A B with it"))
        if module.bias is not None:
            parts.append(HostPart(module.label, "bias behind B: the GPU adds it"))
    if config.changed_base:
        parts.append(
            HostPart("base model", f"initialised as {config.changed_base}: the GPU needs the base weights left by it")
        )
    return tuple(parts)
