"""The committed figures, and what counts as a regression against them."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest

from plora.hw.defs.config import PRESETS as DEVICE_PRESETS
from plora.hw.defs.config import preset
from plora.hw.defs.errors import UserError
from plora.synth.baseline import PRESETS, new_baseline, read_baseline, regressions, write_baseline
from plora.synth.flow import BlockResult, DesignResult


def block(name: str, ge: float, count: int = 1) -> BlockResult:
    return BlockResult(name, name, count, ge, 0, Counter(), Counter(), {}, (), "area")


def design(*blocks: BlockResult) -> DesignResult:
    return DesignResult(preset("full"), blocks, {})


BEFORE = design(block("pe.dot", 1000.0, 64), block("core.small", 10.0), block("front.wiring", 0.0))


def baseline_of(result: DesignResult) -> dict[str, object]:
    # As it is after a round through the file.
    data: dict[str, object] = json.loads(json.dumps(new_baseline([result], {})))
    return data


def changed(name: str, ge: float) -> DesignResult:
    return design(*(dataclasses.replace(b, ge=ge) if b.name == name else b for b in BEFORE.blocks))


def test_growth_up_to_the_tolerance_passes() -> None:
    assert regressions(BEFORE, baseline_of(BEFORE)) == []
    assert regressions(changed("pe.dot", 1050.0), baseline_of(BEFORE)) == []
    assert regressions(changed("pe.dot", 500.0), baseline_of(BEFORE)) == []


def test_a_block_that_grows_beyond_it_is_named_with_what_to_do() -> None:
    (line,) = regressions(changed("pe.dot", 1051.0), baseline_of(BEFORE))
    assert line.startswith("pe.dot: 1051 GE, 5.1 % over the baseline's 1000")
    assert "plora synth --update-baseline --unit pe.dot" in line


def test_tiny_blocks_may_vary_by_a_few_gates() -> None:
    assert regressions(changed("core.small", 19.0), baseline_of(BEFORE)) == []
    assert len(regressions(changed("core.small", 21.0), baseline_of(BEFORE))) == 1
    assert len(regressions(changed("front.wiring", 11.0), baseline_of(BEFORE))) == 1


def test_a_block_without_figures_is_a_regression() -> None:
    (line,) = regressions(design(*BEFORE.blocks, block("core.sfu", 5.0)), baseline_of(BEFORE))
    assert line == "core.sfu: 5 GE, not in the baseline (plora synth --update-baseline)"
    (line,) = regressions(dataclasses.replace(BEFORE, config=preset("small")), baseline_of(BEFORE))
    assert line == "the baseline has no preset 'small', only tiny, full"


def test_some_blocks_are_updated_and_the_others_kept() -> None:
    part = design(block("pe.dot", 1200.0, 64), block("core.sfu", 30.0))
    data = new_baseline([part], {}, baseline_of(BEFORE))
    blocks = data["presets"]["full"]["blocks"]
    assert {name: figures["ge"] for name, figures in blocks.items()} == {
        "pe.dot": 1200.0,
        "core.small": 10.0,
        "front.wiring": 0.0,
        "core.sfu": 30.0,
    }
    assert data["presets"]["full"]["total_ge"] == 64 * 1200 + 10 + 30
    assert data["pe_ge_per_multiply_add"] == 64 * 1200 / 1024


def test_the_committed_figures_add_up_and_meet_the_goals() -> None:
    data = read_baseline()
    assert tuple(data["presets"]) == PRESETS
    assert set(PRESETS) <= set(DEVICE_PRESETS)
    for figures in data["presets"].values():
        total = sum(entry["count"] * entry["ge"] for entry in figures["blocks"].values())
        assert total == pytest.approx(figures["total_ge"], rel=1e-3)
    full = data["presets"]["full"]
    pe = sum(entry["count"] * entry["ge"] for name, entry in full["blocks"].items() if name.startswith("pe."))
    assert data["pe_ge_per_multiply_add"] == pytest.approx(pe / 1024, rel=1e-3)
    assert data["other_logic_over_pe"] == pytest.approx(full["total_ge"] / pe - 1, abs=2e-3)
    # Goals: with its share of tree, accumulators, taps and drain; at 1 GHz; and the overhead around it.
    assert data["pe_ge_per_multiply_add"] < 3500
    assert data["other_logic_over_pe"] < 1.3
    for name, entry in full["blocks"].items():
        if name.startswith("pe."):
            assert entry["fmax_ghz"] is None or entry["fmax_ghz"] >= 1.0, name
    # Whole: what came last, the softmax unit, is in it too.
    for figures in data["presets"].values():
        assert {"sfu.control", "sfu.scale", "core.softmax"} <= set(figures["blocks"])


def test_a_baseline_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*none\.json"):
        read_baseline(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(UserError, match=r"bad\.json is not JSON"):
        read_baseline(tmp_path / "bad.json")
    with pytest.raises(UserError, match=r"cannot write .*belongs to a checkout"):
        write_baseline({}, tmp_path / "no" / "folder.json")
