"""Emission of Verilog: shared modules once, the same bytes every time."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from amaranth.sim import Simulator

from plora.hw.build.platform import EmitPlatform
from plora.hw.build.toolchain import find_verilator
from plora.hw.build.verilog import cached_verilog, emit_verilog
from tests.hw.build.units import Accumulate, Three

FACTORY = "tests.hw.build.units:Three"


@pytest.fixture(scope="module")
def text() -> str:
    return emit_verilog(FACTORY, name="three")


def test_a_shared_module_is_emitted_once_and_instantiated_as_often_as_used(text: str) -> None:
    assert len(re.findall(r"^module accumulate\(", text, re.MULTILINE)) == 1
    assert len(re.findall(r"^  accumulate ", text, re.MULTILINE)) == 3
    assert len(re.findall(r"^module invert\(", text, re.MULTILINE)) == 1


def test_only_modules_with_registers_get_a_clock(text: str) -> None:
    bodies = re.findall(r"^  (accumulate|invert) .*?\);", text, re.MULTILINE | re.DOTALL)
    assert sorted(bodies) == ["accumulate"] * 3 + ["invert"] * 3
    instances = re.findall(r"^  ((?:accumulate|invert) .*?\);)", text, re.MULTILINE | re.DOTALL)
    assert all((".clk(clk)" in body) == body.startswith("accumulate") for body in instances)


def test_verilator_accepts_the_whole(text: str, tmp_path: Path) -> None:
    (tmp_path / "three.v").write_text(text)
    verilator = find_verilator()
    subprocess.run(
        [str(verilator.program), "--lint-only", "-Wno-lint", "--top-module", "three", str(tmp_path / "three.v")],
        env=verilator.environment(),
        check=True,
    )


def test_without_the_platform_shared_units_are_plain_submodules() -> None:
    dut = Three()
    simulator = Simulator(dut)
    simulator.add_clock(1e-6)

    async def check(ctx: Any) -> None:
        ctx.set(dut.a, 5)
        await ctx.tick().repeat(4)
        assert ctx.get(dut.total) == 4 * sum(0xFF - (5 + i) for i in range(3)) % 256

    simulator.add_testbench(check)
    simulator.run()


def test_one_name_for_two_kinds_of_hardware_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)  # emission in a child, whatever runs the tests
    platform = EmitPlatform()
    platform.instance("accumulate", Accumulate(8))
    with pytest.raises(ValueError, match="shared module 'accumulate' stands for"):
        platform.instance("accumulate", Accumulate(9))
    with pytest.raises(RuntimeError, match=r"emission of three failed:[\s\S]*shared module 'accumulate'"):
        emit_verilog(FACTORY, True, name="three")


def test_two_sources_of_one_name_are_refused(tmp_path: Path) -> None:
    platform = EmitPlatform()
    platform.add_source(tmp_path / "a" / "x.v")
    platform.add_source(tmp_path / "a" / "x.v")
    with pytest.raises(ValueError, match=r"two Verilog files called x\.v"):
        platform.add_source(tmp_path / "b" / "x.v")


def test_hand_written_sources_come_first(tmp_path: Path) -> None:
    (tmp_path / "x.v").write_text("// by hand\n")
    platform = EmitPlatform()
    platform.instance("accumulate", Accumulate(8))
    platform.add_source(tmp_path / "x.v")
    assert platform.verilog().index("// by hand") < platform.verilog().index("module accumulate")


def test_the_bytes_do_not_depend_on_the_hash_seed(text: str) -> None:
    script = (
        "import hashlib; from plora.hw.build.verilog import emit_verilog;"
        f"print(hashlib.sha256(emit_verilog({FACTORY!r}, name='three').encode()).hexdigest())"
    )
    for seed in ("0", "1", "random"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        printed = subprocess.run(
            [sys.executable, "-c", script], env=environment, check=True, capture_output=True, text=True
        ).stdout
        assert printed.strip() == hashlib.sha256(text.encode()).hexdigest()


def test_the_cached_text_is_the_emitted_text(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLORA_BUILD_DIR", str(tmp_path))
    assert cached_verilog(FACTORY, name="three") == text
    (stored,) = tmp_path.glob("verilog-three-*/three.v")
    stored.write_text("changed")
    assert cached_verilog(FACTORY, name="three") == "changed"
    assert cached_verilog(FACTORY, False, name="three") == text  # other arguments, another entry
