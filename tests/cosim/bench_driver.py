"""cocotb tests (run inside the simulator): the host driver runs an adapter on the device through cocotbext-axi."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import cocotb
import numpy as np
from cocotb.task import bridge

from plora.hw.defs.config import preset
from plora.sw.adapters import read_adapter
from plora.sw.lora import DeviceAdapter, ModuleReport, Strategy, choose_modules, run_and_compare
from plora.sw.session import open_session
from plora.sw.tiling import SlotSizes
from tests.cosim.axi_host import CocotbDevice

DRAM_BYTES = 1 << 18
ADAPTERS = Path(__file__).resolve().parent.parent / "fixtures" / "peft"


@cocotb.test(timeout_time=5, timeout_unit="ms")
@cocotb.parametrize(stall=[0.0, 0.2])
async def an_adapter_has_the_golden_bits(dut: Any, stall: float) -> None:
    """The same host code as on every other device, on bus models that are not ours."""
    config = preset("tiny")
    device = CocotbDevice(dut, config, dram_bytes=DRAM_BYTES, stall=stall, seed=2)
    await device.start()

    def host() -> list[ModuleReport]:
        session = open_session(device, memory_bytes=DRAM_BYTES, depth=4, slots=SlotSizes(12, 12))
        adapter = read_adapter(ADAPTERS / "lora_qv_r8")
        loaded = DeviceAdapter(session, choose_modules(adapter, "0"), Strategy.E3)
        chance = np.random.default_rng(3)
        reports = []
        for module in loaded.modules:
            x = chance.standard_normal((3, module.device.module.in_features)).astype(np.float16)
            reports.append(run_and_compare(loaded, module, x, session))
        session.queue.close()
        return reports

    start = time.process_time()
    reports = await bridge(host)()
    seconds = time.process_time() - start
    assert len(reports) == 2
    assert all(report.match for report in reports)
    dut._log.info("%d cycles, %.0f per CPU second", device.cycles, device.cycles / seconds)
