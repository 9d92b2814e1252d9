"""The driver finds the device it was told of, and no other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plora.hw.defs.config import preset
from plora.hw.defs.errors import UserError
from plora.hw.defs.registers import global_offset
from plora.sim.functional import FunctionalDevice
from plora.sw.driver import DeviceError, Driver, LinkTraffic, line_bytes
from plora.sw.session import open_session
from plora.sw.tiling import SlotSizes, full_slots


class Altered(FunctionalDevice):
    """A device with another value in one register."""

    def __init__(self, register: str, value: int) -> None:
        super().__init__(preset("tiny"))
        self._altered = (global_offset(register), value)

    def mmio_read(self, offset: int) -> int:
        return self._altered[1] if offset == self._altered[0] else super().mmio_read(offset)


@pytest.mark.parametrize(
    ("register", "value", "message"),
    [
        ("ID", 0xFFFF_FFFF, "no device: register ID reads 0xffffffff"),
        ("INTERFACE", 99, "interface version 99, this host"),
        ("CAPS", 0, "but 'tiny' has"),
        ("BUFFERS", 0, "but 'tiny' has"),
    ],
)
def test_another_device_is_refused(register: str, value: int, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        Driver(Altered(register, value))


@pytest.mark.parametrize("name", ["small", "full"])
def test_another_configuration_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    device = FunctionalDevice(preset("tiny"))
    device.config = preset(name)
    identity = {offset: FunctionalDevice(preset("tiny")).mmio_read(offset) for offset in range(0, 0x10, 4)}
    monkeypatch.setattr(device, "mmio_read", identity.__getitem__)
    with pytest.raises(DeviceError, match="choose the configuration of this device"):
        Driver(device)


def test_it_sets_the_timeouts_and_reads_and_clears_the_counters() -> None:
    device = FunctionalDevice(preset("tiny"))
    driver = Driver(device, chain_timeout_cycles=123, poll_interval_cycles=45, watchdog_cycles=67, chain_limit=8)
    assert device.mmio_read(global_offset("CHAIN_LIMIT")) == 8
    driver.share(core_words=89, host_lines=3)
    assert device.mmio_read(global_offset("WATCHDOG")) == 67
    assert device.mmio_read(global_offset("SHARE")) == 89 | 3 << 16
    assert device.mmio_read(global_offset("CHAIN_TIMEOUT")) == 123
    assert device.mmio_read(global_offset("POLL_INTERVAL")) == 45
    device.wait((1 << 32) + 7)
    assert driver.counters()["CYCLES"] == (1 << 32) + 7
    driver.clear_counters()
    assert set(driver.counters().values()) == {0}


@pytest.mark.parametrize(
    "setting",
    [
        {"chain_limit": 1 << 16},
        {"watchdog_cycles": -1},
        {"poll_interval_cycles": 1 << 32},
        {"chain_timeout_cycles": -5},
    ],
)
def test_a_setting_beyond_its_register_is_refused(setting: dict[str, int]) -> None:
    with pytest.raises(UserError, match=r"is -?\d+: choose 0"):
        Driver(FunctionalDevice(preset("tiny")), **setting)


@pytest.mark.parametrize("words", [{"core_words": 1 << 16}, {"host_lines": -1}])
def test_a_share_beyond_its_register_is_refused(words: dict[str, int]) -> None:
    with pytest.raises(UserError, match="choose 0"):
        Driver(FunctionalDevice(preset("tiny"))).share(**words)


def test_traffic_adds_up() -> None:
    before = LinkTraffic(load_bytes=64, mmio_bytes=4)
    after = replace(before, load_bytes=128, poll_bytes=64)
    assert after.since(before) == LinkTraffic(load_bytes=64, poll_bytes=64)
    assert after.since(before).total_bytes == 128
    assert before.copy() == before
    assert before.copy() is not before
    assert [line_bytes(size) for size in (0, 1, 64, 65)] == [0, 64, 64, 128]


@pytest.mark.parametrize("sizes", [SlotSizes(-1, 12), SlotSizes(12, 10), SlotSizes(25, 12), SlotSizes(12, 1 << 62)])
def test_a_slot_size_that_no_ring_has_is_refused(sizes: SlotSizes) -> None:
    with pytest.raises(UserError, match=r"log2 of a (submission|result) slot's bytes is -?\d+: choose 11 \.\.\. 24"):
        open_session(FunctionalDevice(preset("tiny")), memory_bytes=1 << 20, slots=sizes)


@pytest.mark.parametrize("depth", [0, 1, 4097])
def test_a_ring_of_no_size_is_refused(depth: int) -> None:
    with pytest.raises(UserError, match=f"ring depth is {depth}"):
        open_session(FunctionalDevice(preset("tiny")), memory_bytes=1 << 20, depth=depth)


def test_rings_that_do_not_fit_the_window_are_refused() -> None:
    with pytest.raises(UserError, match="device memory is full: completion ring"):
        open_session(FunctionalDevice(preset("tiny")), memory_bytes=300 << 10, depth=32)
    with pytest.raises(UserError, match="do not fit their window"):
        open_session(FunctionalDevice(preset("tiny")), memory_bytes=1 << 25)


@pytest.mark.parametrize(
    "options", [{"queue": 2}, {"queue": -1}, {"pasid": 1 << 20}, {"timeout_cycles": 0}, {"weight": 0}, {"weight": 256}]
)
def test_a_queue_that_makes_no_sense_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(UserError, match=r"choose|has queues"):
        open_session(FunctionalDevice(preset("tiny")), memory_bytes=1 << 20, **options)  # type: ignore[arg-type]


def test_full_slots_hold_what_the_buffers_hold() -> None:
    assert full_slots(preset("tiny")) == SlotSizes(13, 13)
    assert full_slots(preset("full")) == SlotSizes(20, 19)
