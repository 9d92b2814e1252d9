"""``plora lora``: a PEFT adapter on the device, compared with the golden model and with float64."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plora.hw.defs.config import PRESETS, NdpConfig, preset
from plora.hw.defs.errors import UserError
from plora.sw.cli.command import CommandParser, Result, say

if TYPE_CHECKING:
    from plora.hw.defs.port import DevicePort
    from plora.sw.adapters import Adapter
    from plora.sw.lora import ModuleReport

SUMMARY = "run a PEFT adapter's y = x A B on a device model or the RTL and compare the bits"

_DEVICES = {"model": "model", "timed": "cycle model", "rtl": "RTL"}
MAX_BATCH = 4096
EXIT_MISMATCH = 1


def configure(parser: CommandParser) -> None:
    """Add the verb's flags."""
    parser.add_argument("--adapter", metavar="DIR", type=Path, required=True, help="folder of a PEFT LoRA adapter")
    parser.add_argument(
        "--device",
        choices=tuple(_DEVICES),
        default="model",
        help="functional model, the cycle model, or the RTL under Verilator (default: model)",
    )
    parser.add_argument("--preset", default="small", help=f"size of the device: {', '.join(PRESETS)} (default: small)")
    parser.add_argument(
        "--strategy", choices=("e3", "e4"), default="e3", help="e3: y = x A B; e4: m = x A (default: e3)"
    )
    parser.add_argument(
        "--dtype",
        choices=("fp16", "bf16", "auto"),
        default="auto",
        help="type on the device; auto: BF16 for modules that are stored in it, FP16 for others (default: auto)",
    )
    parser.add_argument(
        "--layers",
        metavar="PATTERN",
        default=None,
        help="modules to run, comma-separated: a layer number, or a shell pattern for the end of a path (default: all)",
    )
    parser.add_argument("--batch-size", type=int, default=4, help="input rows of each module (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="seed of x and of the RTL's timing (default: 0)")


def run(args: argparse.Namespace) -> Result:
    """Load the adapter, run the chosen modules, compare and report."""
    import numpy as np

    from plora.hw.defs.descriptor import DType
    from plora.sw.adapters import device_values, read_adapter
    from plora.sw.lora import DeviceAdapter, Strategy, choose_modules, run_and_compare
    from plora.sw.session import open_session

    if not 1 <= args.batch_size <= MAX_BATCH:
        raise UserError(f"--batch-size {args.batch_size}: choose 1 ... {MAX_BATCH}")
    if args.seed < 0:
        raise UserError(f"--seed {args.seed}: choose 0 or more")
    config = preset(args.preset)
    adapter = read_adapter(args.adapter)
    modules = choose_modules(adapter, args.layers)
    for part in adapter.host_parts:
        say(f"not on the device: {part.name}: {part.what}")
    port, memory_bytes = _open_device(args.device, config, args.seed)
    session = open_session(port, memory_bytes=memory_bytes)
    say(f"loading {len(modules)} modules of {adapter.name}")
    dtype = {"fp16": DType.FP16, "bf16": DType.BF16, "auto": None}[args.dtype]
    loaded = DeviceAdapter(session, modules, Strategy(args.strategy), dtype)
    random = np.random.default_rng(args.seed)
    first_cycle = session.driver.counters()["CYCLES"]
    reports = []
    for module in loaded.modules:
        x = random.standard_normal((args.batch_size, module.device.module.in_features)).astype(np.float32)
        x = device_values(x, module.device.dtype)
        reports.append(run_and_compare(loaded, module, x, session))
    cycles = session.driver.counters()["CYCLES"] - first_cycle
    seconds = sum(report.run_s for report in reports)
    session.queue.close()
    match = all(report.match for report in reports)
    timed = args.device != "model"
    data = {
        "adapter": adapter.name,
        "base_model": adapter.config.base_model,
        "device": args.device,
        "preset": config.name,
        "strategy": args.strategy,
        "batch_size": args.batch_size,
        "seed": args.seed,
        "match": match,
        "modules": [_module_data(report, timed) for report in reports],
        "totals": _totals(reports, sum(module.size_bytes for module in loaded.modules)),
        "not_on_device": [{"name": part.name, "what": part.what} for part in adapter.host_parts],
    }
    if timed:
        data["simulated_cycles"] = cycles
        # All that may differ from one run to the next.
        data["timing"] = {"wall_s": round(seconds, 3), "simulated_cycles_per_s": round(cycles / seconds)}
        say(f"{cycles} cycles in {seconds:.2f} s: {cycles / seconds:.0f} simulated cycles per second")
    text = _text(adapter, args, config, reports, timed)
    return Result(data=data, text=text, exit_status=0 if match else EXIT_MISMATCH)


def _open_device(name: str, config: NdpConfig, seed: int) -> tuple[DevicePort, int]:
    """Return the device and the bytes of its memory."""
    if name == "rtl":
        from plora.hw.cosim.device import RtlDevice

        rtl = RtlDevice(config, seed=seed)
        return rtl, rtl.memory.size
    from plora.sim.device.timed import TimedDevice
    from plora.sim.functional import FunctionalDevice

    model = FunctionalDevice(config) if name == "model" else TimedDevice(config)
    return model, model.memory.size_bytes


def _module_data(report: ModuleReport, timed: bool) -> dict[str, Any]:
    module, product, traffic = report.device.module, report.product, report.traffic
    data = {
        "module": module.label,
        "in_features": module.in_features,
        "rank": module.rank,
        "out_features": module.out_features,
        "scaling": module.scaling,
        "stored_as": module.dtype,
        "computed_in": report.device.dtype.name,
        "match": report.match,
        "max_abs_error": report.max_abs_error,
        "max_relative_error": report.max_relative_error,
        "non_finite_results": report.non_finite,
        "a_rounding_error": report.device.a_rounding,
        "b_rounding_error": report.device.b_rounding,
        "values_flushed_to_zero": report.device.flushed,
        "descriptors": product.descriptors,
        "link_bytes": traffic.total_bytes,
        "link_operand_bytes": traffic.operand_bytes,
        "link_result_bytes": traffic.result_bytes,
    }
    if timed:
        data["core_cycles"] = product.cycles
    return data


def _totals(reports: Sequence[ModuleReport], memory_bytes: int) -> dict[str, Any]:
    return {
        "modules": len(reports),
        "mismatches": sum(not report.match for report in reports),
        "max_relative_error": max(report.max_relative_error for report in reports),
        "descriptors": sum(report.product.descriptors for report in reports),
        "link_bytes": sum(report.traffic.total_bytes for report in reports),
        "device_memory_bytes": memory_bytes,
    }


def _text(
    adapter: Adapter, args: argparse.Namespace, config: NdpConfig, reports: Sequence[ModuleReport], timed: bool
) -> str:
    shape = "x A B" if args.strategy == "e3" else "x A"
    head = ["module", "K x R x N", "descriptors", "link bytes", "error vs float64", "match"]
    if timed:
        head.insert(4, "core cycles")
    rows = [head]
    for report in reports:
        module = report.device.module
        row = [
            module.label,
            f"{module.in_features} x {module.rank} x {module.out_features}",
            str(report.product.descriptors),
            str(report.traffic.total_bytes),
            f"{report.max_relative_error:.1e}" + (f" ({report.non_finite} not finite)" if report.non_finite else ""),
            "yes" if report.match else "NO",
        ]
        if timed:
            row.insert(4, str(report.product.cycles))
        rows.append(row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    wrong = sum(not report.match for report in reports)
    verdict = (
        "all results equal the golden model bit for bit"
        if not wrong
        else f"{wrong} modules DIFFER from the golden model"
    )
    where = f"{config.name} {_DEVICES[args.device]}"
    return "\n".join(
        [f"{adapter.name}: {shape} on the {where}, batch {args.batch_size}, seed {args.seed}", "", *lines, "", verdict]
    )
