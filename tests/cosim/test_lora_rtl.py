"""`plora lora` on real adapters through the RTL: the golden bits, by every strategy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plora.sw.cli import main


@pytest.mark.parametrize("strategy", ["e3", "e4"])
@pytest.mark.parametrize(
    "name", ["lora_qv_r8", "lora_rank_pattern", "lora_rslora_r64", "lora_all_bf16_r16", "lora_qwen3moe_experts_r4"]
)
def test_adapters_have_the_golden_bits(
    capsys: pytest.CaptureFixture[str], fixtures_dir: Path, name: str, strategy: str
) -> None:
    arguments = ["lora", "--adapter", str(fixtures_dir / "peft" / name), "--device", "rtl", "--preset", "tiny"]
    assert main([*arguments, "--strategy", strategy, "--layers", "0", "--batch-size", "3", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["match"] is True
    assert all(module["match"] and module["core_cycles"] > 0 for module in data["modules"])
    assert data["simulated_cycles"] >= sum(module["core_cycles"] for module in data["modules"])
    assert data["timing"]["simulated_cycles_per_s"] > 0


@pytest.mark.parametrize("strategy", ["e3", "e4"])
@pytest.mark.parametrize("name", ["lora_all_bf16_r16", "lora_rank_pattern"])
def test_adapters_have_the_golden_bits_in_bf16(
    capsys: pytest.CaptureFixture[str], fixtures_dir: Path, name: str, strategy: str
) -> None:
    arguments = ["lora", "--adapter", str(fixtures_dir / "peft" / name), "--device", "rtl", "--preset", "tiny"]
    assert main([*arguments, "--dtype", "bf16", "--strategy", strategy, "--layers", "0", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["match"] is True
    assert {module["computed_in"] for module in data["modules"]} == {"BF16"}


def test_the_same_seed_gives_the_same_run(capsys: pytest.CaptureFixture[str], fixtures_dir: Path) -> None:
    arguments = ["lora", "--adapter", str(fixtures_dir / "peft" / "lora_qv_r8"), "--device", "rtl", "--preset", "tiny"]
    runs = []
    for _ in range(2):
        assert main([*arguments, "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        del data["timing"]
        runs.append(data)
    assert runs[0] == runs[1]
