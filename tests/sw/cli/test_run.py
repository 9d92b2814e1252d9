from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from plora.sw.cli import main


def object_of(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["run", *flags, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


PAPER_POINT = ("--workload", "uniform", "--batch-size", "32", "--system", "plora", "--composition", "overlap")


@pytest.mark.parametrize(("model", "tpot_ms", "tokens"), [("llama2-7b", 4.18, 7657), ("llama2-13b", 7.76, 4123)])
def test_the_papers_floor_cases_come_from_stated_parameters(
    capsys: pytest.CaptureFixture[str], model: str, tpot_ms: float, tokens: int
) -> None:
    found = object_of(capsys, "--model", model, *PAPER_POINT)
    assert round(found["tpot_ms"]["mean"], 2) == tpot_ms
    assert round(found["throughput_tokens_per_s"]) == tokens
    assert found["bound_by"] == "hbm"


def test_one_system_gives_one_object_with_its_whole_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    found = object_of(capsys, "--system", "plora", "--seed", "7")
    assert {"tpot_ms", "throughput_tokens_per_s", "bound_by", "config", "seed", "version", "command"} <= set(found)
    assert found["seed"] == found["config"]["seed"] == 7
    assert found["config"]["composition"] == "dependency"
    assert found["config"]["preset"] == "priced"
    assert found["config"]["link_sharing"] == "one-port"
    assert found["config"]["costs"]["protocol"] == "flit"


def test_several_systems_give_a_list_in_the_order_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    found = object_of(capsys, "--system", "all-hbm", "plora", "--batch-size", "4")
    assert [one["system"] for one in found["systems"]] == ["all-hbm", "plora"]
    assert all({"tpot_ms", "throughput_tokens_per_s", "bound_by"} <= set(one) for one in found["systems"])


def test_without_flags_plora_meets_its_baselines_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run"]) == 0
    out = capsys.readouterr().out
    for title in ("PLoRA (NSD)", "Pure CXL", "CPU-LoRA-Offload", "Grace-Hopper", "S-LoRA, 4 GPUs", "GPU, all in HBM"):
        assert title in out
    assert "1000 adapters" in out
    assert "bound by" in out


def test_a_system_that_cannot_hold_the_model_is_left_out_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--model", "mixtral-8x7b", "--system", "plora", "all-hbm", "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert [one["system"] for one in found["systems"]] == ["all-hbm"]
    assert found["systems"][0]["fits_in_hbm"] is False
    assert "plora" in found["left_out"]
    assert "left out: system plora: the weights take" in captured.err


def test_out_holds_summary_configuration_steps_and_timelines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results"
    assert main(["run", "--system", "plora", "s-lora", "--steps", "3", "--out", str(out)]) == 0
    capsys.readouterr()
    summary = json.loads((out / "summary.json").read_text())
    assert summary["config"] == json.loads((out / "config.json").read_text())
    rows = (out / "steps.csv").read_text().splitlines()
    assert rows[0] == "system,step,step_ms,context_tokens_mean,bound_by"
    assert len(rows) == 1 + 2 * 3
    trace = json.loads((out / "trace-plora.json").read_text())["traceEvents"]
    spans = [event for event in trace if event["ph"] == "X"]
    lanes = {event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    assert {"gpu", "link.down", "link.up", "dev0", "dev3"} <= lanes
    assert all(event["dur"] > 0 and event["ts"] >= 0 for event in spans)
    assert any("layer3" in event["name"] for event in spans)


def test_the_same_flags_give_the_same_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for _ in range(2):
        assert main(["run", "--workload", "lmsys", "--system", "ns", "--json"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_a_configuration_file_is_a_run_and_flags_win(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'model = "llama3-8b"\nsystems = ["plora"]\nbatch_size = 8\n'
        "[gpu_numbers]\nhbm_gb_per_s = 4000\n[costs]\npolls = 2\n"
        '[systems_changed.plora.adapters]\nstrategies = ["E3"]\n'
    )
    found = object_of(capsys, "--config", str(path), "--batch-size", "5")
    assert found["config"]["model"] == "llama3-8b"
    assert found["batch"]["requested"] == 5
    assert found["config"]["gpu"]["hbm_gb_per_s"] == 4000
    assert found["config"]["costs"]["polls"] == 2
    assert found["strategies"]["E3"] == found["adapters_in_batch"]


def test_a_trace_is_a_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.csv"
    rows = "".join(f"{n},100,50,{n % 3}\n" for n in range(40))
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens,lora_id\n" + rows)
    found = object_of(capsys, "--workload", str(path), "--system", "plora", "--batch-size", "6")
    assert found["adapters_in_batch"] == 3
    assert found["config"]["num_adapters"] == 3
    path.write_text(rows.replace(",0\n", "\n").replace(",1\n", "\n").replace(",2\n", "\n"))
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + path.read_text())
    found = object_of(capsys, "--workload", str(path), "--system", "plora", "--batch-size", "6", "--num-adapters", "9")
    assert found["config"]["num_adapters"] == 9
    assert "uniform over 9 adapters" in found["config"]["workload_origin"]["adapters"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "gpt-9"], "unknown model 'gpt-9'"),
        (["--workload", "rush"], "unknown workload 'rush'"),
        (["--system", "warp"], "unknown system 'warp'"),
        (["--batch-size", "-1"], "batch size is -1"),
        (["--batch-size", "many"], "invalid int value"),
        (["--link-gb-per-s", "nan"], "gb_per_s is nan; give a finite number"),
        (["--composition", "magic"], "invalid choice"),
        (["--trace-layers", "-1"], "--trace-layers is -1"),
        (["--config", "/nowhere.toml"], "no such file"),
        (["--num-adapters", "20000", "--system", "plora"], "far memory has"),
        (["--model", "llama3.1-405b", "--system", "plora", "nd-e3"], "no system can run this"),
    ],
)
def test_bad_input_is_one_clear_line(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert main(["run", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.strip().splitlines()[-1]
    assert last.startswith("plora: error: ")
    assert message in last


def test_an_unknown_key_in_a_configuration_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text('modle = "llama2-7b"\n')
    assert main(["run", "--config", str(path)]) == 2
    assert "unknown field `modle`" in capsys.readouterr().err


def test_names_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    found = object_of(capsys, "--list")
    assert "plora" in found["systems"]
    assert "llama2-7b" in found["models"]
    assert "uniform-long" in found["workloads"]


def test_the_default_run_takes_less_than_two_seconds_of_processor_time() -> None:
    code = "import time, sys; from plora.sw.cli import main; s = main(['run']); print(time.process_time()); sys.exit(s)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout.splitlines()[-1]) < 2.0


def test_a_decode_point_takes_little_time_once_started() -> None:
    from plora.sim.system.config import RunOptions, resolve
    from plora.sim.system.decode import decode_run

    def seconds() -> float:
        start = time.process_time()
        resolved = resolve(RunOptions(composition="overlap", steps=1))
        decode_run(resolved, resolved.systems[0])
        return time.process_time() - start

    seconds()
    assert min(seconds() for _ in range(5)) < 0.06
