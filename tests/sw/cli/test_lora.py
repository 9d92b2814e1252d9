"""`plora lora` from the command line: result, files, exit status, and mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plora.hw.defs.queue import LINE_BYTES
from plora.sim.functional.core import FunctionalCore
from plora.sw.cli import main


@pytest.fixture
def adapter(fixtures_dir: Path) -> str:
    return str(fixtures_dir / "peft" / "lora_rank_pattern")


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = main(["lora", *arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_the_json_says_all_that_the_table_says(capsys: pytest.CaptureFixture[str], adapter: str) -> None:
    status, data = run_json(capsys, "--adapter", adapter, "--preset", "tiny", "--layers", "1", "--batch-size", "3")
    assert status == 0
    assert data["command"] == "lora"
    assert (data["adapter"], data["base_model"]) == ("lora_rank_pattern", "tiny-llama-gqa")
    assert (data["device"], data["preset"], data["strategy"], data["batch_size"]) == ("model", "tiny", "e3", 3)
    assert data["match"] is True
    assert len(data["modules"]) == data["totals"]["modules"] == 7
    query = next(module for module in data["modules"] if module["module"].endswith("q_proj"))
    assert (query["in_features"], query["rank"], query["out_features"], query["scaling"]) == (64, 4, 64, 4.0)
    assert query["match"] is True
    assert query["link_bytes"] > query["link_operand_bytes"] + query["link_result_bytes"] > 0
    assert "simulated_cycles" not in data, "the functional model has no time"
    assert main(["lora", "--adapter", adapter, "--preset", "tiny", "--layers", "1", "--batch-size", "3"]) == 0
    table = capsys.readouterr().out
    assert "model.layers.1.self_attn.q_proj" in table
    assert "all results equal the golden model bit for bit" in table


def test_the_same_flags_give_the_same_bytes(capsys: pytest.CaptureFixture[str], adapter: str) -> None:
    arguments = ("--adapter", adapter, "--preset", "tiny", "--seed", "5")
    assert run_json(capsys, *arguments) == run_json(capsys, *arguments)
    assert run_json(capsys, *arguments)[1] != run_json(capsys, *arguments[:-1], "6")[1]


@pytest.mark.parametrize("preset", ["tiny", "small", "full"])
@pytest.mark.parametrize("strategy", ["e3", "e4"])
def test_every_preset_and_strategy_matches(
    capsys: pytest.CaptureFixture[str], adapter: str, preset: str, strategy: str
) -> None:
    status, data = run_json(capsys, "--adapter", adapter, "--preset", preset, "--strategy", strategy, "--layers", "0")
    assert (status, data["match"], data["totals"]["mismatches"]) == (0, True, 0)


def test_what_the_gpu_must_do_is_said(capsys: pytest.CaptureFixture[str], fixtures_dir: Path) -> None:
    folder = str(fixtures_dir / "peft" / "lora_modules_to_save_lm_head")
    assert main(["lora", "--adapter", folder, "--json"]) == 0
    captured = capsys.readouterr()
    assert [part["name"] for part in json.loads(captured.out)["not_on_device"]] == [
        "lm_head.weight",
        "model.embed_tokens.weight",
    ]
    assert "not on the device: lm_head.weight" in captured.err


def test_results_go_to_a_folder(capsys: pytest.CaptureFixture[str], adapter: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["lora", "--adapter", adapter, "--layers", "q_proj", "--out", str(out)]) == 0
    assert json.loads((out / "result.json").read_text())["match"] is True
    assert (out / "result.txt").read_text().strip() == capsys.readouterr().out.strip()


def test_a_difference_is_an_exit_status_of_its_own(
    capsys: pytest.CaptureFixture[str], adapter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = FunctionalCore._write_lines
    monkeypatch.setattr(
        FunctionalCore,
        "_write_lines",
        lambda self, address, data: write(self, address, bytes([data[0] ^ 1]) + data[1:]),
    )
    status, data = run_json(capsys, "--adapter", adapter, "--layers", "q_proj")
    assert (status, data["match"], data["totals"]["mismatches"]) == (1, False, 2)
    assert main(["lora", "--adapter", adapter, "--layers", "q_proj"]) == 1
    assert "2 modules DIFFER" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--adapter"),
        (["--adapter", "/nowhere"], "holds no adapter_config.json"),
        (["--adapter", "ADAPTER", "--preset", "huge"], "unknown device preset 'huge'"),
        (["--adapter", "ADAPTER", "--device", "gpu"], "--device"),
        (["--adapter", "ADAPTER", "--strategy", "e1"], "--strategy"),
        (["--adapter", "ADAPTER", "--batch-size", "0"], "--batch-size 0: choose 1 ... 4096"),
        (["--adapter", "ADAPTER", "--batch-size", "-3"], "--batch-size -3"),
        (["--adapter", "ADAPTER", "--batch-size", "many"], "--batch-size"),
        (["--adapter", "ADAPTER", "--batch-size", "5000"], "--batch-size 5000"),
        (["--adapter", "ADAPTER", "--seed", "-1"], "--seed -1"),
        (["--adapter", "ADAPTER", "--layers", "99"], "--layers '99' names no module"),
        (["--adapter", "ADAPTER", "--colour"], "--colour"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(
    capsys: pytest.CaptureFixture[str], adapter: str, arguments: list[str], message: str
) -> None:
    assert main(["lora", *(adapter if argument == "ADAPTER" else argument for argument in arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("plora: error: ")
    assert message in line


def test_the_cycle_model_takes_the_cycles_of_the_rtl(capsys: pytest.CaptureFixture[str], adapter: str) -> None:
    arguments = ("--adapter", adapter, "--preset", "tiny", "--layers", "1", "--batch-size", "3")
    found = {}
    for device in ("timed", "rtl"):
        status, data = run_json(capsys, *arguments, "--device", device)
        assert (status, data["match"], data["device"]) == (0, True, device)
        found[device] = data
    modules = list(zip(found["timed"]["modules"], found["rtl"]["modules"], strict=True))
    for ours, theirs in modules:
        assert ours["core_cycles"] == pytest.approx(theirs["core_cycles"], rel=0.03, abs=8)
    # The host polls after pauses that double: a completion a cycle later may cost one look, and its pause, more.
    looks = sum(abs(ours["link_bytes"] - theirs["link_bytes"]) // LINE_BYTES for ours, theirs in modules)
    assert looks <= len(modules) // 2
    total = found["rtl"]["simulated_cycles"]
    longest_pause = total / len(modules)
    assert abs(found["timed"]["simulated_cycles"] - total) <= 0.03 * total + looks * longest_pause
    assert main(["lora", *arguments, "--device", "timed"]) == 0
    assert "on the tiny cycle model" in capsys.readouterr().out
