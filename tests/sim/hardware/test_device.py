"""Pool devices as data."""

from __future__ import annotations

from pathlib import Path

import pytest

from plora.hw.defs.config import preset
from plora.hw.defs.errors import UserError
from plora.sim.hardware.device import load_device, load_devices


def test_the_papers_device() -> None:
    device = load_device("plora")
    assert (device.dram_gb_per_s, device.ndp_tflops, device.capacity_bytes) == (1100, 2.048, 512e9)
    assert {fact.status for fact in device.facts.values()} == {"paper"}


def test_its_compute_is_that_of_the_full_core() -> None:
    assert load_device("plora").ndp_tflops * 1000 == preset("full").peak_gflops


def test_a_plain_expander_has_the_same_memory_and_no_compute() -> None:
    plora, plain = load_device("plora"), load_device("cxl-expander")
    assert plora.has_ndp and not plain.has_ndp
    assert (plain.dram_gb_per_s, plain.capacity_bytes) == (plora.dram_gb_per_s, plora.capacity_bytes)


def test_an_unknown_device_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"unknown device 'x'; known: .*plora"):
        load_device("x")


@pytest.mark.parametrize(
    ("line", "word"),
    [("channels = 0", "channels is 0"), ("sram_bytes = -1", "sram_bytes"), ("tflops = 1", "tflops")],
)
def test_bad_device_data_names_the_key(tmp_path: Path, line: str, word: str) -> None:
    path = tmp_path / "devices.toml"
    path.write_text(f"[mine]\ndram_gb_per_s = 100\ncapacity_bytes = 1e9\nndp_tflops = 1\n{line}\n")
    with pytest.raises(UserError, match=word):
        load_devices(path)


def test_descriptions_of_hardware_can_be_keys() -> None:
    from plora.sim.hardware.gpu import load_gpu
    from plora.sim.hardware.link import load_link
    from plora.sim.llm import load_model
    from plora.sim.workload import load_workload

    things = (
        load_gpu("h100-sxm"),
        load_link("cxl3.1-x16"),
        load_device("plora"),
        load_model("llama2-7b"),
        load_workload("lmsys"),
    )
    assert len({thing: thing.name for thing in things}) == len(things)
