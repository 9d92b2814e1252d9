"""The test bench around the Verilated device: transport, timing, order, and faults that it must notice."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plora.hw.build.verilator import build_library
from plora.hw.cosim.device import AccessError, Interrupt, ResponseOrder, RtlError
from plora.hw.defs.config import preset
from plora.hw.defs.errors import UserError
from tests.hw.cosim.conftest import MakeDevice
from tests.hw.cosim.passthrough import FAULT_REGISTER, FAULTS, INTERRUPT_REGISTER

TINY = preset("tiny")


def random_bytes(size: int, seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes()


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 400)), min_size=1, max_size=8),
    st.sampled_from([0.0, 0.1, 0.6]),
    st.integers(0, 2**64 - 1),
    st.booleans(),
)
def test_stores_of_any_alignment_read_back_whatever_the_stalls(
    make_device: MakeDevice, stores: list[tuple[int, int]], stall: float, seed: int, reorder: bool
) -> None:
    device = make_device(
        stall=stall,
        seed=seed,
        host_reorder=reorder,
        host_delay_cycles=50 if reorder else 0,
        latency_jitter_cycles=9,
        response_order=ResponseOrder.BEATS if reorder else ResponseOrder.IN_ORDER,
    )
    device.memory[:] = 0xA5
    expected = bytearray(b"\xa5" * 4096)
    for index, (address, size) in enumerate(stores):
        data = random_bytes(size, index)
        device.hdm_write(address, data)
        expected[address : address + size] = data
    first = stores[0]
    assert device.hdm_read(*first) == expected[first[0] : sum(first)]
    device.hdm_fence()
    assert device.peek(0, 4096) == expected
    assert device.hdm_read(0, 4096) == expected


def test_memory_is_interleaved_over_channels_by_lines(make_device: MakeDevice) -> None:
    device = make_device()
    device.hdm_write(0, random_bytes(3 * 64, 0))
    device.hdm_fence()
    assert [counters.write_beats for counters in device.counters] == [2, 1]


def test_poke_is_seen_through_the_device_and_costs_no_cycles(make_device: MakeDevice) -> None:
    device = make_device()
    values = np.arange(500, dtype=np.float16)
    before = device.cycles
    device.poke(128, values)
    assert device.cycles == before
    assert device.hdm_read(128, 1000) == values.tobytes()


def test_a_posted_store_is_not_in_memory_before_its_acknowledgement(make_device: MakeDevice) -> None:
    device = make_device(write_latency_cycles=200)
    device.hdm_write(0, b"\xff" * 64)
    device.wait(150)
    assert device.peek(0, 64) == bytes(64)
    device.hdm_fence()
    assert device.peek(0, 64) == b"\xff" * 64


def test_read_latency_is_at_least_what_was_asked_for(make_device: MakeDevice) -> None:
    def cycles_of_a_load(latency: int) -> int:
        device = make_device(read_latency_cycles=latency)
        before = device.cycles
        device.hdm_read(0, 64)
        return device.cycles - before

    assert cycles_of_a_load(500) - cycles_of_a_load(100) == 400


def test_a_register_write_overtakes_held_back_stores(make_device: MakeDevice) -> None:
    device = make_device(host_delay_cycles=5000, seed=3)
    device.hdm_write(0, b"\xff" * 64)
    device.mmio_write(0, 1)
    assert device.peek(0, 64) == bytes(64)


def test_reordered_stores_leave_out_of_order_but_not_to_the_same_line(make_device: MakeDevice) -> None:
    device = make_device(host_reorder=True, write_latency_cycles=0)
    lines = 200
    for line in range(lines):
        device.hdm_write(64 * line, (line + 1).to_bytes(64, "little"))
    arrived_out_of_order = False
    while device.peek(0, 64 * lines) != b"".join((line + 1).to_bytes(64, "little") for line in range(lines)):
        present = device.memory[: 64 * lines].reshape(lines, 64)[:, :2].any(axis=1)
        arrived_out_of_order |= bool((np.diff(present.astype(int)) > 0).any())
        device.wait(20)
    assert arrived_out_of_order
    for value in range(40):
        device.hdm_write(640, bytes([value]) * 64)
    device.hdm_fence()
    assert device.peek(640, 64) == bytes([39]) * 64


@pytest.mark.parametrize("stall", [0.0, 0.5])
def test_registers_and_interrupts(make_device: MakeDevice, stall: float) -> None:
    device = make_device(stall=stall)
    for index in range(8):
        device.mmio_write(4 * index, 0xFFFF_FFFF - index)
    assert [device.mmio_read(4 * index) for index in range(8)] == [0xFFFF_FFFF - index for index in range(8)]
    assert device.interrupts == []
    device.mmio_write(4 * INTERRUPT_REGISTER, 77)
    device.wait(50)
    (message,) = device.interrupts
    assert message == Interrupt(message.cycle, address=0x1234_5678_9ABC_DEF0, data=77)


def test_the_same_seed_gives_the_same_cycles(make_device: MakeDevice) -> None:
    def cycles(seed: int) -> int:
        device = make_device(stall=0.3, seed=seed, latency_jitter_cycles=5)
        device.hdm_write(0, bytes(5000))
        device.hdm_fence()
        return device.cycles

    assert cycles(1) == cycles(1)
    assert len({cycles(seed) for seed in range(5)}) > 1


def test_a_reset_drops_what_is_under_way_and_keeps_memory(make_device: MakeDevice) -> None:
    device = make_device(write_latency_cycles=100)
    device.poke(4096, b"kept")
    device.hdm_write(0, b"\xff" * 640)
    device.wait(20)
    device.reset()
    device.hdm_fence()
    assert device.peek(0, 640) == bytes(640)
    assert device.hdm_read(4096, 4) == b"kept"
    assert device.counters[0].read_beats == 1


def test_memory_errors_reach_the_host_as_errors(make_device: MakeDevice) -> None:
    device = make_device()
    device.inject_error(128, 1)
    assert device.hdm_read(0, 128) == bytes(128)
    with pytest.raises(AccessError, match=r"load of the line at DPA 0x80 answered SLVERR"):
        device.hdm_read(64, 128)
    device.hdm_write(130, b"lost")
    with pytest.raises(AccessError, match=r"store of the line at DPA 0x80 answered SLVERR"):
        device.hdm_fence()
    device.clear_errors()
    assert device.hdm_read(128, 64) == bytes(64)
    with pytest.raises(AccessError, match="register 0x100 answered DECERR"):
        device.mmio_write(0x100, 0)


NOTICED = {
    "withdraw_ar": "AR valid was withdrawn",
    "change_aw": "AW payload changed",
    "change_w": "W payload changed",
    "cross_4k": "crosses 4 KiB",
    "narrow": "beat size other than 64",
    "wlast": "WLAST is 0 on beat 1 of 1",
    "beyond_memory": "an address beyond the memory",
    "unaligned": "not a multiple of 64",
    "fixed_burst": "burst type other than INCR",
    "wrong_bid": "for which no write is complete",
    "rlast": "RLAST is 0",
    "assertion": "an assertion in the design failed",
    "hang": "no answer to a host store within 5000 cycles",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_broken_rule_is_noticed(make_device: MakeDevice, fault: str) -> None:
    device = make_device(stall=0.6, timeout_cycles=5000)

    def use() -> None:
        device.mmio_write(4 * FAULT_REGISTER, FAULTS.index(fault))
        for line in range(20):
            device.hdm_write(64 * line, random_bytes(64, line))
            device.hdm_read(64 * line, 64)
        device.hdm_fence()

    if fault == "none":
        use()
        return
    with pytest.raises(RtlError, match=NOTICED[fault]) as caught:
        use()
    assert "cycle" in str(caught.value) and "seed 1" in str(caught.value)
    with pytest.raises(RtlError):  # a fault is final
        device.wait(1)


def test_addresses_that_wait_for_data_do_not_block_an_independent_master(make_device: MakeDevice) -> None:
    device = make_device(address_waits_for_data=True, stall=0.3)
    data = random_bytes(2000, 1)
    device.hdm_write(5, data)
    assert device.hdm_read(5, 2000) == data


def test_modules_compiled_as_blocks_behave_the_same(make_device: MakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> tuple[bytes, int]:
        device = make_device(stall=0.2)
        device.hdm_write(70, random_bytes(1000, 1))
        return device.hdm_read(0, 1200), device.cycles

    flat = run()
    with_blocks = functools.partial(build_library, blocks=("locate_2",))
    monkeypatch.setattr("plora.hw.cosim.device.build_library", with_blocks)
    assert run() == flat


@pytest.mark.parametrize("suffix", ["vcd"])
def test_a_wave_file_is_written(make_device: MakeDevice, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"waves.{suffix}"
    with make_device(trace=path) as device:
        device.hdm_write(0, b"\x5a" * 64)
        device.hdm_fence()
    text = path.read_text()
    assert "s_mem__awaddr" in text and "$enddefinitions" in text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dram_bytes": 100}, "multiple of 128"),
        ({"dram_bytes": 1 << 25}, r"up to 2\*\*24"),
        ({"stall": 1.0}, "stall is 1.0"),
        ({"host_outstanding": 0}, "host_outstanding is 0"),
        ({"trace": "x.txt"}, "must end in .vcd or .fst"),
    ],
)
def test_bad_settings_are_refused(make_device: MakeDevice, settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_device(**settings)


def test_bad_addresses_are_refused(make_device: MakeDevice) -> None:
    device = make_device()
    with pytest.raises(UserError, match="not within the device's memory"):
        device.hdm_write(device.memory.size - 1, b"12")
    with pytest.raises(UserError, match="not within the device's memory"):
        device.peek(-1, 1)
    with pytest.raises(UserError, match="not a multiple of 4"):
        device.mmio_read(2)
    device.close()
    with pytest.raises(ValueError, match="was closed"):
        device.wait(1)
