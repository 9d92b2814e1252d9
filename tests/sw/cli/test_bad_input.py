"""Input that a user can mend ends in one line and status 2, never in a traceback or half a result."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from plora.sim.hardware.device import load_device
from plora.sim.hardware.gpu import load_gpu
from plora.sim.hardware.link import load_link
from plora.sim.system.config import RunOptions
from plora.sim.system.costs import load_costs
from plora.sw.cli import main

RUN = ("run", "--system", "plora", "--batch-size", "2", "--steps", "1")

NUMBERS = [
    *(("gpu_numbers", key) for key in ("hbm_gb_per_s", "hbm_bytes", "fp16_tflops", "sms", "kernel_launch_ns")),
    *(("link_numbers", key) for key in ("gb_per_s", "port_gb_per_s", "ports", "one_way_latency_ns", "switch_hop_ns")),
    *(("device_numbers", key) for key in ("dram_gb_per_s", "capacity_bytes", "ndp_tflops", "channels")),
    *(("costs", key) for key in ("poll_interval_ns", "command_ns", "completion_one_ways", "near_int8_rate")),
]
MAY_BE_ZERO = ("kernel_launch_ns", "one_way_latency_ns", "switch_hop_ns", "ndp_tflops")


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Run what must be refused, and return its line."""
    status = main([*flags, "--json"])
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("plora:")]
    assert (status, out, len(lines)) == (2, "", 1), err
    return lines[0]


def test_the_numbers_here_are_those_of_the_hardware() -> None:
    things = {
        "gpu_numbers": load_gpu(RunOptions().gpu),
        "link_numbers": load_link(RunOptions().link),
        "device_numbers": load_device(RunOptions().device),
        "costs": load_costs("priced"),
    }
    assert all(hasattr(things[table], key) for table, key in NUMBERS if key != "gb_per_s")


@pytest.mark.parametrize(("table", "key"), NUMBERS)
def test_numbers_with_which_times_would_overflow_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], table: str, key: str
) -> None:
    zero = () if table == "costs" or key in MAY_BE_ZERO else ("0.0", "1e-308")
    for value in ("-1.0", "1e308", "nan", "inf", *zero):
        file = tmp_path / "run.toml"
        file.write_text(f"[{table}]\n{key} = {value}\n")
        assert key in refused(capsys, *RUN, "--config", str(file)), value


@pytest.mark.parametrize(
    "flags",
    [
        ("run", "--link-gb-per-s", "1e-308"),
        ("run", "--link-latency-ns", "1e308"),
        ("serve", "--num-requests", "2", "--request-rate", "1e-308"),
    ],
)
def test_flags_with_which_times_would_overflow_are_refused(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    assert "at least" in refused(capsys, *flags)


@pytest.mark.parametrize("command", [RUN, (*RUN, "--steps", "20"), ("serve", "--num-requests", "2")])
def test_costs_with_which_times_would_overflow_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    file = tmp_path / "costs.toml"
    file.write_text("[costs]\npolls = 1e9\nflag_bytes = 1e9\n")
    assert "a single transfer or product takes" in refused(capsys, *command, "--config", str(file))


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"r":' + b"9" * 6000 + b"}",
        b'x = "',
        b"x = " + b"9" * 6000,
        b"x = " + b"[" * 9999,
    ],
    ids=["not UTF-8", "deep", "long number", "open string", "long TOML number", "deep TOML"],
)
def test_files_that_no_parser_takes_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    for flag, name in (
        ("--model", "m.json"),
        ("--workload", "t.jsonl"),
        ("--workload", "t.csv"),
        ("--workload", "w.toml"),
        ("--system", "s.toml"),
        ("--config", "c.toml"),
    ):
        (tmp_path / name).write_bytes(content)
        assert name in refused(capsys, "run", flag, str(tmp_path / name))
    (tmp_path / "d.jsonl").write_bytes(content)
    assert "d.jsonl" in refused(capsys, "predict", "--descriptors", str(tmp_path / "d.jsonl"))
    (tmp_path / "adapter_config.json").write_bytes(content)
    assert "adapter_config.json" in refused(capsys, "lora", "--adapter", str(tmp_path))


@pytest.mark.parametrize("path", ["n" * 5000, "a\0b"], ids=["too long", "null character"])
def test_paths_that_no_file_can_have_are_refused(capsys: pytest.CaptureFixture[str], path: str) -> None:
    for flag in ("--model", "--workload", "--system", "--config"):
        refused(capsys, "run", flag, path)
        refused(capsys, "run", flag, path + ".toml")
    refused(capsys, "predict", "--descriptors", path)
    refused(capsys, "lora", "--adapter", path)


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a\0b", "a\nb", "n" * 300])
def test_a_system_whose_name_is_no_file_name_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    bundled = (resources.files("plora.sim.system") / "data" / "systems" / "plora.toml").read_text(encoding="utf-8")
    lines = [line for line in bundled.splitlines() if not line.startswith("name = ")]
    file = tmp_path / "system.toml"
    file.write_text("\n".join([f"name = {json.dumps(name)}", *lines]))
    out = tmp_path / "out"
    assert "name is" in refused(capsys, "run", "--system", str(file), "--out", str(out))
    assert not out.exists()


@pytest.mark.parametrize("redirection", [">&-", ">/dev/full"])
def test_a_result_that_cannot_be_printed_is_an_error(redirection: str) -> None:
    command = f'"{sys.executable}" -m plora.sw.cli defs --json {redirection}'
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("plora: error: standard output") and len(done.stderr.splitlines()) == 1


def test_trace_values_of_a_wrong_type_or_size_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"arrived_at": 0, "num_prefill_tokens": 1, "num_decode_tokens": 1, "lora_id": "a"}
    azure = {"TIMESTAMP": None, "ContextTokens": 1, "GeneratedTokens": 1}
    file = tmp_path / "t.jsonl"
    for rows in ([row | {"lora_id": None}], [azure], [azure | {"TIMESTAMP": 5}], [row, row | {"arrived_at": 1e300}]):
        file.write_text("".join(json.dumps(one) + "\n" for one in rows))
        assert "t.jsonl" in refused(capsys, "serve", "--workload", str(file))


@pytest.mark.parametrize(
    "table",
    [
        "[costs]\nno_such_key = 1",
        "[gpu_numbers]\nno_such_key = 1",
        "[link_numbers]\nno_such_key = 1",
        "[device_numbers]\nno_such_key = 1",
        "[systems_changed.plora.kv]\nno_such_key = 1",
        "[systems_changed.no_such_key.kv]\nhome = 'far'",
        "no_such_key = 1",
        "[no_such_key]\nx = 1",
    ],
)
@pytest.mark.parametrize("verb", ["run", "serve"])
def test_an_unknown_key_is_refused_with_the_name_of_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str, table: str
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(table + "\n")
    line = refused(capsys, verb, "--system", "plora", "--config", str(file))
    assert "mine.toml" in line and "no_such_key" in line


@pytest.mark.parametrize("value", ["-1", "x", "1.5"])
def test_a_count_of_layers_that_is_none_is_refused(capsys: pytest.CaptureFixture[str], value: str) -> None:
    assert "--trace-layers" in refused(capsys, *RUN, "--trace-layers", value)


def test_a_folder_of_results_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for out in (file, file / "below", tmp_path / "link", Path("/proc/nowhere"), Path("a\0b"), Path("n" * 300)):
        for verb in (RUN, ("serve", "--num-requests", "2")):
            refused(capsys, *verb, "--out", str(out))
    assert file.read_text() == ""
