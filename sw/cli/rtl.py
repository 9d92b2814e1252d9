"""``plora rtl``: the device's RTL as Verilog and as a compiled simulation."""

from __future__ import annotations

import argparse
import hashlib
import time

from plora.hw.defs.config import PRESETS, NdpConfig, preset
from plora.sw.cli import rtl_bench, rtl_exec, rtl_wave
from plora.sw.cli.command import CommandModule, CommandParser, Result, say, table

SUMMARY = "emit the device's Verilog, build its simulation; run, measure and trace descriptors on it"

_NESTED: dict[str, CommandModule] = {"exec": rtl_exec, "bench": rtl_bench, "wave": rtl_wave}


def configure(parser: CommandParser) -> None:
    """Add the nested verbs."""
    actions = parser.add_nested(
        {
            "emit": "write the Verilog of a preset, the same bytes every time (--out DIR gets ndp_device.v)",
            "build": "compile the simulation of a preset with Verilator, unless that was done before",
            "overhead": "measure what a descriptor costs beside its work: cycles, and bytes on the link",
            **{name: module.SUMMARY for name, module in _NESTED.items()},
        }
    )
    for name, module in _NESTED.items():
        module.configure(actions[name])
    for name in ("emit", "build", "overhead"):
        actions[name].add_argument("--preset", default="small", help=f"{', '.join(PRESETS)} (default: small)")
    actions["build"].add_argument(
        "--trace", choices=("vcd", "fst"), default=None, help="compile waves in (default: none)"
    )


def run(args: argparse.Namespace) -> Result:
    """Run the nested verb."""
    if args.action in _NESTED:
        return _NESTED[args.action].run(args)
    config = preset(args.preset)
    if args.action == "overhead":
        return _overhead(config)
    return _emit(config) if args.action == "emit" else _build(config, args.trace)


def _overhead(config: NdpConfig) -> Result:
    from plora.sw.overhead_run import LATENCIES, as_dict, measure_overhead

    say(f"measuring on the {config.name} RTL")
    found = measure_overhead(config)
    purposes = [name for name, value in found[0].link_bytes.items() if name != "load_bytes"]
    shapes = [f"{one.device_rows} x {one.device_columns}, B {one.gpu_rows}" for one in found]
    cycles = table(
        ("shape", "doorbell to first word", "to last word", "to completion", "of these after the result"),
        [
            (
                shape,
                f"{one.times.doorbell_to_first_word} ({one.read_latencies_before:g} reads)",
                str(one.times.first_to_last_word),
                f"{one.times.last_word_to_completion} ({one.write_latencies_after:g} writes)",
                str(one.times.result_to_completion),
            )
            for shape, one in zip(shapes, found, strict=True)
        ],
    )
    link = table(
        ("shape", "completion by", *(name.removesuffix("_bytes") for name in purposes)),
        [
            (shape, how, *(f"{moved[name]:g}" for name in purposes))
            for shape, one in zip(shapes, found, strict=True)
            for how, moved in (("polling", one.link_bytes), ("interrupt", one.link_bytes_interrupt))
        ],
    )
    read, write = LATENCIES[0]
    text = f"cycles, memory latency {read} (read) and {write} (write)\n{cycles}\n\nlink bytes a descriptor\n{link}"
    return Result(data=as_dict(config, found), text=text)


def _emit(config: NdpConfig) -> Result:
    from plora.hw.build.verilog import TOP, device_verilog

    text = device_verilog(config)
    digest = hashlib.sha256(text.encode()).hexdigest()
    name = f"{TOP}.v"
    return Result(
        data={
            "preset": config.name,
            "top": TOP,
            "file": name,
            "size_bytes": len(text.encode()),
            "modules": sum(line.startswith("module ") for line in text.splitlines()),
            "sha256": digest,
        },
        text=f"{name}: {config.name} device, {len(text.encode())} bytes, sha256 {digest}",
        files={name: text},
    )


def _build(config: NdpConfig, trace: str | None) -> Result:
    from plora.hw.build.device import device_library
    from plora.hw.build.toolchain import find_cxx, find_verilator

    start = time.perf_counter()
    library = device_library(config, trace=trace)
    seconds = time.perf_counter() - start
    return Result(
        data={
            "preset": config.name,
            "library": library,
            "library_bytes": library.stat().st_size,
            "verilator": f"{find_verilator().version} ({find_verilator().origin})",
            "compiler": find_cxx()[1],
            "build_s": round(seconds, 3),
        },
        text=f"{library} ({seconds:.1f} s)",
    )
