"""The device under cocotb with the bus models of cocotbext-axi: a `DevicePort` that shares no code with ours.

Host code is blocking: it runs in a thread of `cocotb.task.bridge`, and each method here is a coroutine
turned back into a blocking call by `cocotb.task.resume`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any

from cocotb.clock import Clock
from cocotb.task import resume
from cocotb.triggers import ClockCycles, RisingEdge
from cocotb.utils import get_sim_time
from cocotbext.axi import AxiBus, AxiLiteBus, AxiLiteMaster, AxiMaster, AxiRam, AxiResp

from plora.hw.defs.config import WORD_BYTES, NdpConfig
from plora.hw.defs.ports import HOST_BUS, MMIO_BUS, memory_bus

PERIOD_NS = 2


class CocotbDevice:
    """The design ``dut`` with an AxiRam on every memory channel and masters on the host's ports.

    Args:
        dut: cocotb's handle of the top.
        config: sizes of the design.
        dram_bytes: bytes of device memory.
        max_burst_len: longest burst that the host's AXI master makes, in beats.
        stall: probability that a channel of a bus model pauses in a cycle.
        seed: decides when.
    """

    def __init__(
        self,
        dut: Any,
        config: NdpConfig,
        *,
        dram_bytes: int,
        max_burst_len: int = 1,
        stall: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.config = config
        self._dut = dut
        self._posted: list[Any] = []

        def bus(prefix: str, kind: Any = AxiBus) -> Any:
            return kind.from_prefix(dut, prefix, bus_separator="__", case_insensitive=False)

        clocked = (dut.clk, dut.rst)
        self._rams = [
            AxiRam(bus(memory_bus(channel)), *clocked, size=dram_bytes // config.channels)
            for channel in range(config.channels)
        ]
        self._host = AxiMaster(bus(HOST_BUS), *clocked, max_burst_len=max_burst_len)
        self._io = AxiLiteMaster(bus(MMIO_BUS, AxiLiteBus), *clocked)
        chance = random.Random(seed)
        for model in (*self._rams, self._host, self._io):
            for side in (model.write_if, model.read_if):
                side.log.setLevel(logging.WARNING)
                for name in ("aw_channel", "w_channel", "b_channel", "ar_channel", "r_channel"):
                    if stall and hasattr(side, name):
                        getattr(side, name).set_pause_generator(_pauses(chance, stall))
        self.hdm_write = resume(self._hdm_write)
        self.hdm_read = resume(self._hdm_read)
        self.hdm_fence = resume(self._hdm_fence)
        self.mmio_write = resume(self._mmio_write)
        self.mmio_read = resume(self._mmio_read)
        self.wait = resume(self._wait)

    async def start(self) -> None:
        """Start the clock and reset the design."""
        Clock(self._dut.clk, PERIOD_NS, unit="ns").start()
        self._dut.msix__ready.value = 1
        self._dut.rst.value = 1
        await ClockCycles(self._dut.clk, 5)
        self._dut.rst.value = 0
        # cocotbext-axi drops what it is given in the cycle after reset.
        await ClockCycles(self._dut.clk, 5)

    @property
    def cycles(self) -> int:
        """Clock cycles simulated so far."""
        return int(get_sim_time("ns")) // PERIOD_NS

    def memory(self, size_bytes: int) -> bytes:
        """The first bytes of device memory, past the device: channels hold lines in turn."""
        lines = []
        for line in range(size_bytes // WORD_BYTES):
            index, channel = divmod(line, self.config.channels)
            lines.append(self._rams[channel].read(index * WORD_BYTES, WORD_BYTES))
        return b"".join(lines)

    async def _hdm_write(self, address: int, data: bytes) -> None:
        if data:
            self._posted.append(self._host.init_write(address, bytes(data)))

    async def _hdm_read(self, address: int, size_bytes: int) -> bytes:
        await self._hdm_fence()
        if not size_bytes:
            return b""
        answer = await self._host.read(address, size_bytes)
        assert answer.resp == AxiResp.OKAY, f"load at {address:#x}: {answer.resp}"
        return bytes(answer.data)

    async def _hdm_fence(self) -> None:
        for store in self._posted:
            await store.wait()
            assert store.data.resp == AxiResp.OKAY, f"store at {store.data.address:#x}: {store.data.resp}"
        self._posted.clear()

    async def _mmio_write(self, offset: int, value: int) -> None:
        answer = await self._io.write(offset, value.to_bytes(4, "little"))
        assert answer.resp == AxiResp.OKAY, f"register {offset:#x}: {answer.resp}"

    async def _mmio_read(self, offset: int) -> int:
        answer = await self._io.read(offset, 4)
        assert answer.resp == AxiResp.OKAY, f"register {offset:#x}: {answer.resp}"
        return int.from_bytes(answer.data, "little")

    async def _wait(self, cycles: int) -> None:
        await ClockCycles(self._dut.clk, max(cycles, 1))
        await RisingEdge(self._dut.clk)


def _pauses(chance: random.Random, probability: float) -> Iterator[bool]:
    while True:
        yield chance.random() < probability
