"""Every benchmark says how it is called, and refuses what it does not know."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = sorted(
    path.stem
    for path in Path(__file__).parent.glob("*.py")
    if not path.stem.startswith(("test_", "_")) and "__main__" in path.read_text()
)


@pytest.mark.parametrize(("flag", "status"), [("--help", 0), ("--nonsense", 2)])
@pytest.mark.parametrize("name", BENCHMARKS)
def test_help_and_unknown_flags_end_at_once(
    name: str, flag: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, flag])
    with pytest.raises(SystemExit) as caught:
        runpy.run_module(f"tests.bench.{name}", run_name="__main__")
    assert caught.value.code == status
    out, err = capsys.readouterr()
    assert "usage:" in (out if status == 0 else err)


def test_all_benchmarks_are_found() -> None:
    assert len(BENCHMARKS) >= 5
