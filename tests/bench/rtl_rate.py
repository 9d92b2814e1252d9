"""Simulated cycles per second of the Verilated device: `python -m tests.bench.rtl_rate [PRESET ...]`.

CPU time of this process while the device computes (an adapter of rank 64 at batch 32, every result
compared with the golden model outside the measured time) and while it waits.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from plora.hw.cosim.device import RtlDevice
from plora.hw.defs.config import PRESETS, preset
from plora.sw.adapters import read_adapter
from plora.sw.lora import DeviceAdapter, Strategy, choose_modules, run_and_compare
from plora.sw.session import open_session

ADAPTER = Path(__file__).resolve().parent.parent / "fixtures" / "peft" / "lora_rslora_r64"
BATCH_SIZE = 32
IDLE_CYCLES = 20_000


def measure(name: str, layers: str | None = None) -> dict[str, float]:
    """Return cycles of the work, and cycles per CPU second at work and waiting, of preset ``name``."""
    with RtlDevice(preset(name)) as device:
        session = open_session(device, memory_bytes=device.memory.size)
        adapter = DeviceAdapter(session, choose_modules(read_adapter(ADAPTER), layers), Strategy.E3)
        chance = np.random.default_rng(0)
        inputs = [
            chance.standard_normal((BATCH_SIZE, module.device.module.in_features)).astype(np.float16)
            for module in adapter.modules
        ]
        for module, x in zip(adapter.modules, inputs, strict=True):
            assert run_and_compare(adapter, module, x, session).match, module.device.module.label
        first_cycle, start = device.cycles, time.process_time()
        for module, x in zip(adapter.modules, inputs, strict=True):
            adapter.run(module, x)
        cycles, seconds = device.cycles - first_cycle, time.process_time() - start
        start = time.process_time()
        device.wait(IDLE_CYCLES)
        idle_seconds = time.process_time() - start
    return {
        "cycles": cycles,
        "cycles_per_cpu_s": cycles / seconds,
        "idle_cycles_per_cpu_s": IDLE_CYCLES / idle_seconds,
    }


def main() -> None:
    """Print a line for each preset."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", metavar="PRESET", nargs="*", help=f"{', '.join(PRESETS)} (default: tiny small)")
    names = parser.parse_args().presets or ["tiny", "small"]
    for name in names:
        if name not in PRESETS:
            parser.error(f"unknown preset {name!r}: choose one of {', '.join(PRESETS)}")
    for name in names:
        rates = measure(name)
        print(f"{name}: " + ", ".join(f"{key} {value:.0f}" for key, value in rates.items()))


if __name__ == "__main__":
    main()
