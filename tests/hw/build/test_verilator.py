"""Builds of the simulation that must fail clearly; those that succeed are exercised in tests/hw/cosim."""

from __future__ import annotations

from pathlib import Path

import pytest

from plora.hw.build.verilator import build_library
from plora.hw.defs.errors import UserError


def test_verilog_that_does_not_compile_names_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLORA_BUILD_DIR", str(tmp_path))
    # The runtime is not what is tested here; without it the test takes seconds less.
    monkeypatch.setattr("plora.hw.build.verilator._Build.runtime", lambda self: tmp_path / "none")
    with pytest.raises(
        UserError, match=r"building lib-bad failed in verilator \(status \d+\): see (.*\.log)"
    ) as caught:
        build_library("module bad(input clk); nonsense", top="bad", channels=1)
    log = Path(str(caught.value).rsplit("see ", 1)[1])
    assert "syntax error" in log.read_text()
    assert not list(tmp_path.glob("lib-bad-*/"))


def test_a_build_folder_with_a_space_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLORA_BUILD_DIR", str(tmp_path / "with space"))
    with pytest.raises(UserError, match="space in its name: set PLORA_BUILD_DIR"):
        build_library("module m(input clk); endmodule", top="m", channels=1)


def test_an_unknown_wave_format_is_refused() -> None:
    with pytest.raises(ValueError, match="trace must be one of"):
        build_library("module m(input clk); endmodule", top="m", channels=1, trace="saif")
