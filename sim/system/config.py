"""What a run is: every choice by name, overridable from one file, resolved to objects once."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from plora.hw.defs.errors import UserError
from plora.sim.datafile import LARGEST, LONGEST_NS, checked, convert, read_toml
from plora.sim.hardware.device import NdpDeviceSpec, load_device
from plora.sim.hardware.gpu import Gpu, load_gpu
from plora.sim.hardware.link import Link, load_link
from plora.sim.llm.config import ModelConfig, load_model
from plora.sim.llm.lora import LoraScope
from plora.sim.system.compose import COMPOSITIONS, Composition
from plora.sim.system.costs import Costs, check_costs, load_costs
from plora.sim.system.layers import AdapterWave, WorkOptions
from plora.sim.system.source import DEFAULT_ADAPTERS, Source, load_source
from plora.sim.system.spec import MOST_PARTS, Gpus, SystemSpec, check_system, load_system
from plora.sim.workload.popularity import Popularity

T = TypeVar("T")

_MAY_BE_ZERO = ("l2_bytes", "reserve_bytes", "ndp_tflops", "sram_bytes")
"""Numbers of hardware, beside latencies, without which there still is a machine."""


class RunOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The choices of a run; a configuration file has the same keys.

    Tables override single numbers of what is chosen by name: `gpu_numbers`, `device_numbers` and
    `link_numbers` fields of the hardware, `costs` fields of the preset, `systems_changed` fields of
    systems by name. None takes the workload's, the composition's or the system's own value.
    """

    model: str = "llama2-7b"
    workload: str = "uniform"
    systems: tuple[str, ...] = ("plora",)
    batch_size: int | None = None
    num_adapters: int | None = None
    popularity: Literal["distinct", "uniform", "skewed", "identical", "power"] | None = None
    popularity_alpha: float | None = None
    context_tokens: int | None = None
    steps: int = 16
    composition: Composition = "dependency"
    preset: Literal["paper", "priced"] | None = None
    gpu: str = "h100-sxm"
    device: str = "plora"
    num_devices: int = 4
    link: str = "cxl3.1-x16"
    link_sharing: Literal["one-port", "per-device"] = "one-port"
    kv_cache_dtype: Literal["fp16", "bf16", "int8", "int4"] = "fp16"
    tensor_parallel_size: int | None = None
    adapter_wave: AdapterWave = "sharded"
    sub_batches: int = 1
    lora_scope: LoraScope = "all"
    adapter_shape: Literal["true", "square"] = "true"
    experts: Literal["expected", "active"] = "expected"
    seed: int = 0
    gpu_numbers: dict[str, float] = {}
    device_numbers: dict[str, float] = {}
    link_numbers: dict[str, float] = {}
    costs: dict[str, Any] = {}
    systems_changed: dict[str, dict[str, Any]] = {}


def read_options(path: Path, base: RunOptions) -> RunOptions:
    """Return `base` with the keys of the TOML file `path` over it; unknown keys are refused."""
    raw = read_toml(path)
    known = msgspec.to_builtins(base)
    return convert({**known, **raw}, RunOptions, str(path))


@dataclass(frozen=True)
class Resolved:
    """The objects that `RunOptions` name, with all overrides applied and checked."""

    options: RunOptions
    model: ModelConfig
    source: Source
    systems: tuple[SystemSpec, ...]
    gpu: Gpu
    fabric: Link
    device: NdpDeviceSpec
    link: Link
    costs: Costs
    preset: str
    work: WorkOptions
    batch_size: int


def _with_numbers(thing: T, numbers: dict[str, float], table: str) -> T:
    """Replace numeric fields of a dataclass; refuses unknown and non-numeric ones."""
    able = {
        f.name: getattr(thing, f.name)
        for f in fields(thing)  # type: ignore[arg-type]
        if isinstance(getattr(thing, f.name), (int, float)) and not isinstance(getattr(thing, f.name), bool)
    }
    changes: dict[str, Any] = {}
    for name, value in numbers.items():
        if name not in able:
            raise UserError(f"{table}: unknown key {name!r}; known: {', '.join(sorted(able))}")
        latency = name.endswith("_ns")
        most = LONGEST_NS if latency else LARGEST
        checked(value, f"{table}: {name}", maximum=most, exclusive=not latency and name not in _MAY_BE_ZERO)
        if isinstance(able[name], int) and not (value.is_integer() and value <= MOST_PARTS):
            raise UserError(f"{table}: {name} is {value:g}; give a whole number of at most {MOST_PARTS}")
        changes[name] = type(able[name])(value)
    return replace(thing, **changes)  # type: ignore[type-var]


def _with_costs(costs: Costs, changes: dict[str, Any], where: str) -> Costs:
    unknown = sorted(set(changes) - set(costs.__struct_fields__))
    if unknown:
        raise UserError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(costs.__struct_fields__)}")
    return check_costs(convert({**msgspec.to_builtins(costs), **changes}, Costs, where), where)


def _with_tables(raw: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(raw)
    for key, value in changes.items():
        deeper = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _with_tables(merged[key], value) if deeper else value
    return merged


def _system(name: str, changes: dict[str, dict[str, Any]], gpus: int | None, prefix: str) -> SystemSpec:
    spec = load_system(name)
    if gpus is not None:
        spec = msgspec.structs.replace(spec, gpus=Gpus(gpus))
    if spec.name not in changes:
        return spec
    where = f"{prefix}systems_changed.{spec.name}"
    raw = _with_tables(msgspec.to_builtins(spec), changes[spec.name])
    return check_system(convert(raw, SystemSpec, where), where)


def _source(options: RunOptions) -> Source:
    """Return the workload, with another popularity law where one is named."""
    law, alpha = options.popularity, options.popularity_alpha
    if alpha is not None and law is None:
        raise UserError("popularity_alpha is an exponent of a law; give --popularity skewed or power with it")
    popularity = None
    if law is not None:
        popularity = Popularity(law, options.num_adapters or DEFAULT_ADAPTERS, alpha=1.0 if alpha is None else alpha)
    return load_source(options.workload, options.num_adapters, options.seed, popularity)


def _at_least(value: int, least: int, name: str, most: int = 1 << 20) -> int:
    if not least <= value <= most:
        raise UserError(f"{name} is {value}; give {least} to {most}")
    return value


def resolve(options: RunOptions, file: Path | None = None) -> Resolved:
    """Look everything up and check it; `file` is named where its tables are refused.

    Raises:
        UserError: an unknown name, a number out of range, or choices that do not go together.
    """
    if options.composition not in COMPOSITIONS:
        raise UserError(f"unknown composition {options.composition!r}; known: {', '.join(COMPOSITIONS)}")
    # The closed forms are the paper's own, so they count as the paper does unless told otherwise.
    preset = options.preset or ("priced" if options.composition == "dependency" else "paper")
    prefix = f"{file}: " if file is not None else ""
    costs = _with_costs(load_costs(preset), options.costs, f"{prefix}costs")
    model = load_model(options.model)
    if options.seed < 0:
        raise UserError(f"seed is {options.seed}; give an integer of at least 0")
    source = _source(options)
    gpu = _with_numbers(load_gpu(options.gpu), options.gpu_numbers, f"{prefix}gpu_numbers")
    link = load_link(options.link)
    rate = options.link_numbers.get("gb_per_s")
    others = {k: v for k, v in options.link_numbers.items() if k != "gb_per_s"}
    link = _with_numbers(link, others, f"{prefix}link_numbers")
    if rate is not None:
        link = link.with_rate(rate)
    if not options.systems:
        raise UserError("no system named; give at least one")
    batch = options.batch_size if options.batch_size is not None else source.batch_size
    resolved = Resolved(
        options=options,
        model=model,
        source=source,
        systems=tuple(
            _system(name, options.systems_changed, options.tensor_parallel_size, prefix) for name in options.systems
        ),
        gpu=gpu,
        fabric=load_link(gpu.fabric),
        device=_with_numbers(load_device(options.device), options.device_numbers, f"{prefix}device_numbers"),
        link=link,
        costs=costs,
        preset=preset,
        work=WorkOptions(
            weights=None if costs.weights == "nominal" else "exact",
            experts=options.experts,
            kv_dtype=options.kv_cache_dtype,
            kv_scales=costs.kv_scales,
            lora_scope=options.lora_scope,
            adapter_shape=options.adapter_shape,
            adapter_wave=options.adapter_wave,
        ),
        batch_size=_at_least(batch, 1, "batch size", 65536),
    )
    unknown = sorted(set(options.systems_changed) - {spec.name for spec in resolved.systems})
    if unknown:
        raise UserError(f"{prefix}systems_changed: {unknown[0]!r} is not among the systems of this run")
    _at_least(options.num_devices, 1, "number of devices", MOST_PARTS)
    if options.tensor_parallel_size is not None:
        _at_least(options.tensor_parallel_size, 1, "tensor parallel size", MOST_PARTS)
    _at_least(options.steps, 1, "number of steps")
    _at_least(options.sub_batches, 1, "number of sub-batches", 64)
    if options.context_tokens is not None:
        _at_least(options.context_tokens, 1, "context", 1 << 24)
    return resolved
