"""Flags that name a system, a model, a workload and hardware: shared by the verbs that simulate systems."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from plora.sw.cli.command import CommandParser

if TYPE_CHECKING:
    from plora.sim.system.config import RunOptions

_DIRECT = (
    "model",
    "workload",
    "systems",
    "batch_size",
    "num_adapters",
    "popularity",
    "popularity_alpha",
    "context_tokens",
    "steps",
    "composition",
    "preset",
    "gpu",
    "device",
    "num_devices",
    "link",
    "link_sharing",
    "kv_cache_dtype",
    "tensor_parallel_size",
    "adapter_wave",
    "sub_batches",
    "lora_scope",
    "adapter_shape",
    "experts",
    "seed",
)


def add_system_flags(parser: CommandParser) -> None:
    """Add what every simulation of systems takes."""
    add = parser.add_argument
    add("--model", metavar="NAME|PATH", help="model by name, or a config.json or a folder that holds one")
    add("--workload", metavar="NAME|FILE", help="workload by name, a workload .toml, or a trace (.csv, .jsonl)")
    add("--num-adapters", type=int, metavar="N", help="adapters in the pool; 0: base model (default: the workload's)")
    add(
        "--popularity",
        choices=("distinct", "uniform", "skewed", "identical", "power"),
        help="which adapters requests ask for, instead of the workload's own law",
    )
    add("--popularity-alpha", type=float, metavar="X", help="exponent of skewed (Zipf) or power (S-LoRA) (default: 1)")
    add(
        "--preset",
        choices=("paper", "priced"),
        help="overheads: those the paper charges, or all (default: priced with dependency, paper with the others)",
    )
    add("--gpu", metavar="NAME", help="GPU (default: h100-sxm)")
    add(
        "--tensor-parallel-size",
        type=int,
        metavar="N",
        help="GPUs that share every matrix and head, each with a pool of its own (default: the system's)",
    )
    add(
        "--adapter-wave",
        choices=("sharded", "naive"),
        help="adapters over several GPUs: split as their waves need it (default), or as the base weights are",
    )
    add("--device", metavar="NAME", help="memory device (default: plora)")
    add("--num-devices", type=int, metavar="N", help="memory devices of each GPU (default: 4)")
    add("--link", metavar="NAME", help="link to the devices (default: cxl3.1-x16)")
    add("--link-gb-per-s", type=float, metavar="X", help="rate of that link per direction")
    add("--link-latency-ns", type=float, metavar="X", help="one-way latency of that link")
    add(
        "--link-sharing",
        choices=("one-port", "per-device"),
        help="all devices behind one port of the GPU (default), or a port each",
    )
    add("--kv-cache-dtype", choices=("fp16", "bf16", "int8", "int4"), help="type of the KV cache (default: fp16)")
    add(
        "--lora-scope",
        choices=("all", "attention", "all-experts"),
        help="matrices that adapters touch; all leaves routed experts out (default: all)",
    )
    add("--adapter-shape", choices=("true", "square"), help="square counts every matrix hidden x hidden, as the paper")
    add("--experts", choices=("expected", "active"), help="experts a batch reads: those it touches, or one token's")
    add("--seed", type=int, metavar="N", help="seed of ranks, adapters and lengths (default: 0)")
    add("--config", type=Path, metavar="FILE", help="TOML file with any of these and single numbers of hardware")


def options_of(args: argparse.Namespace, base: RunOptions) -> RunOptions:
    """Return the options that flags and configuration file give over `base`; flags win.

    Raises:
        UserError: an unknown key, a wrong type, an unreadable file.
    """
    import msgspec

    from plora.sim.datafile import convert
    from plora.sim.system.config import RunOptions, read_options
    from plora.sim.system.spec import bundled_systems

    options = base if args.config is None else read_options(args.config, base)
    flags = {name: getattr(args, name) for name in _DIRECT if getattr(args, name, None) is not None}
    if flags.get("systems") == ["all"]:
        flags["systems"] = list(bundled_systems())
    if "systems" in flags:
        flags["systems"] = list(dict.fromkeys(flags["systems"]))
    numbers = dict(options.link_numbers)
    for flag, key in (("link_gb_per_s", "gb_per_s"), ("link_latency_ns", "one_way_latency_ns")):
        if getattr(args, flag) is not None:
            numbers[key] = getattr(args, flag)
    return convert({**msgspec.to_builtins(options), **flags, "link_numbers": numbers}, RunOptions, "flags")
