"""cocotb tests (run inside the simulator): the host's loads and stores against the bus models."""

from __future__ import annotations

import os
import random
from typing import Any

import cocotb
from cocotb.task import bridge

from plora.hw.defs.config import preset
from plora.hw.defs.registers import ID_VALUE, global_offset
from tests.cosim.axi_host import CocotbDevice

DRAM_BYTES = 1 << 16
EXPECTED_ID = int(os.environ.get("PLORA_TEST_EXPECT_ID", ID_VALUE))


@cocotb.test(timeout_time=2, timeout_unit="ms")
@cocotb.parametrize(max_burst_len=[1, 16], stall=[0.0, 0.3])
async def loads_and_stores_reach_every_byte(dut: Any, max_burst_len: int, stall: float) -> None:
    """Stores of any size and alignment change their bytes and no others."""
    config = preset("tiny")
    device = CocotbDevice(dut, config, dram_bytes=DRAM_BYTES, max_burst_len=max_burst_len, stall=stall, seed=1)
    await device.start()

    def host() -> None:
        assert device.mmio_read(global_offset("ID")) == EXPECTED_ID
        chance = random.Random(7)
        expected = bytearray(8192)
        device.hdm_write(0, bytes(expected))
        device.hdm_fence()
        for _ in range(20):
            address, size = chance.randrange(6000), chance.choice([1, 63, 64, 65, 200, 1500])
            data = chance.randbytes(size)
            # Two stores under way to one line may pass each other: AXI ids differ.
            device.hdm_fence()
            device.hdm_write(address, data)
            expected[address : address + size] = data
            first = chance.randrange(8000)
            assert device.hdm_read(first, 150) == expected[first : first + 150]
        device.hdm_fence()
        assert device.memory(8192) == expected

    await bridge(host)()
    dut._log.info("%d cycles", device.cycles)
