"""``plora rtl``: the device's RTL as Verilog and as a compiled simulation."""

from __future__ import annotations

import argparse
import hashlib
import time

from plora.hw.defs.config import PRESETS, NdpConfig, preset
from plora.sw.cli import rtl_exec
from plora.sw.cli.command import CommandParser, Result, say

SUMMARY = "emit the device's Verilog, build its simulation, or run descriptors on it"


def configure(parser: CommandParser) -> None:
    """Add the nested verbs."""
    actions = parser.add_nested(
        {
            "emit": "write the Verilog of a preset, the same bytes every time (--out DIR gets ndp_device.v)",
            "build": "compile the simulation of a preset with Verilator, unless that was done before",
            "exec": rtl_exec.SUMMARY,
        }
    )
    rtl_exec.configure(actions["exec"])
    for name in ("emit", "build"):
        actions[name].add_argument("--preset", default="small", help=f"{', '.join(PRESETS)} (default: small)")
    actions["build"].add_argument(
        "--trace", choices=("vcd", "fst"), default=None, help="compile waves in (default: none)"
    )


def run(args: argparse.Namespace) -> Result:
    """Run the nested verb."""
    if args.action == "exec":
        return rtl_exec.run(args)
    config = preset(args.preset)
    return _emit(config) if args.action == "emit" else _build(config, args.trace)


def _emit(config: NdpConfig) -> Result:
    from plora.hw.build.verilog import TOP, device_verilog

    say(f"emitting the {config.name} device")
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

    say(f"building the {config.name} device (the first time takes a while)")
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
