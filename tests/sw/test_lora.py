"""Adapters on the device: which modules, what it costs in memory, and that a wrong bit is seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from plora.hw.defs.config import preset
from plora.hw.defs.errors import UserError
from plora.sim.functional import FunctionalDevice
from plora.sw.adapters import Adapter, LoraModule, read_adapter
from plora.sw.lora import DeviceAdapter, Strategy, choose_modules, run_and_compare
from plora.sw.session import Session, open_session


@pytest.fixture
def adapter(fixtures_dir: Path) -> Adapter:
    return read_adapter(fixtures_dir / "peft" / "lora_qwen3moe_experts_r4")


def session(memory_bytes: int = 1 << 22) -> Session:
    return open_session(FunctionalDevice(preset("tiny"), 1 << 22), memory_bytes=memory_bytes, depth=8)


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        (None, 20),
        ("0", 10),
        ("1", 10),
        ("0,1", 20),
        ("q_proj", 2),
        ("self_attn.*", 4),
        ("layers.0.self_attn.?_proj", 2),
        ("experts.down_proj", 8),
        ("down_proj[3]", 2),
        ("model.layers.1.mlp.experts.gate_up_proj[0]", 1),
        ("q_proj, 0", 11),
    ],
)
def test_modules_are_chosen_by_layer_or_path(adapter: Adapter, pattern: str | None, count: int) -> None:
    chosen = choose_modules(adapter, pattern)
    assert len(chosen) == count
    assert chosen == [module for module in adapter.modules if module in chosen], "the order is the adapter's"


@pytest.mark.parametrize("pattern", ["", "7", "proj", "q_proj,zz", "layers.0", "[3]"])
def test_a_pattern_that_names_nothing_is_refused(adapter: Adapter, pattern: str) -> None:
    with pytest.raises(UserError, match=r"names no module of adapter .* such as model\.layers"):
        choose_modules(adapter, pattern)


@pytest.mark.parametrize("strategy", Strategy)
def test_every_module_has_the_golden_bits(adapter: Adapter, strategy: Strategy) -> None:
    s = session()
    free = s.allocator.free_bytes
    loaded = DeviceAdapter(s, adapter.modules, strategy)
    assert free - s.allocator.free_bytes == sum(module.size_bytes for module in loaded.modules)
    for module in loaded.modules:
        x = np.random.default_rng(1).standard_normal((3, module.device.module.in_features)).astype(np.float16)
        report = run_and_compare(loaded, module, x, s)
        assert report.match
        columns = module.device.module.out_features if strategy is Strategy.E3 else module.device.module.rank
        assert report.product.y.shape == (3, columns)
        assert 0 < report.max_relative_error < 2e-3
        assert report.traffic.load_bytes == 0, "loading is not part of a run"
    loaded.unload()
    assert s.allocator.free_bytes == free


@pytest.mark.parametrize("part", ["a", "b"])
def test_one_wrong_bit_in_device_memory_is_seen(adapter: Adapter, part: str) -> None:
    s = session()
    loaded = DeviceAdapter(s, adapter.modules[:1], Strategy.E3)
    (module,) = loaded.modules
    x = np.random.default_rng(1).standard_normal((3, module.device.module.in_features)).astype(np.float16)
    address = (module.a if part == "a" else module.b or module.a).region.address
    byte = s.driver.port.hdm_read(address + 1, 1)[0]
    s.driver.port.hdm_write(address + 1, bytes([byte ^ 0x40]))
    assert not run_and_compare(loaded, module, x, s).match


def test_results_that_are_not_finite_are_counted_and_left_out_of_the_error() -> None:
    module = LoraModule("m", None, np.full((1, 2), 300, np.float32), np.full((2, 1), 200, np.float32), 1.0, 1.0, "F32")
    s = session()
    loaded = DeviceAdapter(s, [module], Strategy.E3)
    report = run_and_compare(loaded, loaded.modules[0], np.array([[1, 0.5]], np.float16), s)
    assert report.match
    assert report.non_finite == 2
    assert report.max_abs_error == 0.0
    assert report.product.numeric == 2


def test_an_adapter_that_does_not_fit_leaves_nothing_behind(adapter: Adapter) -> None:
    s = session(memory_bytes=(8 << 14) + 9000)
    free = s.allocator.free_bytes
    with pytest.raises(UserError, match=r"device memory is full: model\.layers\.\d.* [AB] needs"):
        DeviceAdapter(s, adapter.modules, Strategy.E3)
    assert s.allocator.free_bytes == free
