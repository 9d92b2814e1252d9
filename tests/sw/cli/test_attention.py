"""`plora attention` from the command line: result, exit status, inputs from files, and mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from plora.sim.functional.core import FunctionalCore
from plora.sw.cli import main

SMALL = ("--heads", "4", "--kv-heads", "2", "--head-dim", "32", "--tokens", "70", "--preset", "tiny")


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = main(["attention", *arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_the_json_says_all_that_the_table_says(capsys: pytest.CaptureFixture[str]) -> None:
    status, data = run_json(capsys, *SMALL, "--steps", "3", "--devices", "2", "--gpu-tokens", "5")
    assert status == 0
    assert (data["heads"], data["kv_heads"], data["head_dim"], data["tokens"]) == (4, 2, 32, 70)
    assert (data["match"], data["within_bound"], data["gpu_tokens"]) == (True, True, 5)
    assert [step["tokens"] for step in data["steps"]] == [70, 71, 72]
    for step in data["steps"]:
        assert 0 < step["max_abs_error"] < step["error_bound"] < 0.01
        # Two devices, two KV heads: keys and values by one descriptor each.
        assert (step["partial_results"], step["descriptors"]) == (4, 8)
        # Two rows of 32 values and an anchor from each chain.
        assert step["link_result_bytes"] == 4 * 2 * 128
        assert "core_cycles" not in step, "the functional model has no time"
    # A token more is, for each head, a word of key, and values in pieces of eight bytes, each charged as a line.
    assert data["steps"][1]["append_link_bytes"] < data["steps"][0]["append_link_bytes"] / 4
    assert main(["attention", *SMALL]) == 0
    assert "every partial result equals the golden model bit for bit" in capsys.readouterr().out


@pytest.mark.parametrize(("dtype", "error"), [("int8", 0.02), ("int4", 0.3)])
def test_a_cache_of_integers_has_golden_bits_and_an_error_of_its_own(
    capsys: pytest.CaptureFixture[str], dtype: str, error: float
) -> None:
    arguments = (*SMALL, "--kv-dtype", dtype, "--steps", "2", "--devices", "2", "--gpu-tokens", "5")
    status, data = run_json(capsys, *arguments)
    assert (status, data["kv_dtype"], data["match"], data["within_bound"]) == (0, dtype, True, True)
    for step in data["steps"]:
        assert step["max_abs_error"] < step["error_bound"] < step["rounding_error"] < error
    assert main(["attention", *arguments]) == 0
    assert f"error of {dtype.upper()}" in capsys.readouterr().out


def test_the_same_flags_give_the_same_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_json(capsys, *SMALL, "--seed", "5") == run_json(capsys, *SMALL, "--seed", "5")
    assert run_json(capsys, *SMALL, "--seed", "5")[1] != run_json(capsys, *SMALL, "--seed", "6")[1]


def test_bf16_takes_what_fp16_cannot_hold(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    sizes = {"q": (2.0**-30, (6, 16)), "k": (2.0**30, (40, 3, 16)), "v": (2.0**40, (40, 3, 16))}
    arrays: dict[str, Any] = {
        name: np.float32(size) * random.standard_normal(shape, np.float32) for name, (size, shape) in sizes.items()
    }
    np.savez(tmp_path / "qkv.npz", **arrays)
    given = ("--input", str(tmp_path / "qkv.npz"), "--preset", "tiny", "--gpu-tokens", "3")
    assert main(["attention", *given]) == 2
    assert "values that FP16 cannot hold" in capsys.readouterr().err
    status, data = run_json(capsys, *given, "--dtype", "bf16")
    (step,) = data["steps"]
    assert (status, data["dtype"], data["match"], data["within_bound"]) == (0, "bf16", True, True)
    assert 0 < step["max_abs_error"] < step["error_bound"] < 2.0**-7 * np.abs(arrays["v"]).max()
    arrays["k"][0, 0, 0] = np.inf
    np.savez(tmp_path / "qkv.npz", **arrays)
    assert main(["attention", *given, "--dtype", "bf16"]) == 2
    assert "k has 1 values that BF16 cannot hold" in capsys.readouterr().err


def test_a_model_gives_the_shape(capsys: pytest.CaptureFixture[str]) -> None:
    status, data = run_json(capsys, "--model", "llama3-8b", "--tokens", "33", "--preset", "full", "--devices", "3")
    assert (status, data["heads"], data["kv_heads"], data["head_dim"]) == (0, 32, 8, 128)
    # Eight whole words a token and head, whatever the head.
    assert data["steps"][0]["append_link_bytes"] == 33 * 8 * 8 * 64


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_inputs_come_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str) -> None:
    random = np.random.default_rng(1)
    arrays: dict[str, Any] = {
        name: random.standard_normal(shape).astype(np.float32)
        for name, shape in {"q": (2, 6, 16), "k": (40, 3, 16), "v": (40, 3, 16)}.items()
    }
    file = tmp_path / f"qkv.{kind}"
    if kind == "npz":
        np.savez(file, **arrays)
    else:
        save_file(arrays, file)
    status, data = run_json(capsys, "--input", str(file), "--preset", "tiny")
    assert (status, data["heads"], data["kv_heads"], data["head_dim"], data["tokens"]) == (0, 6, 3, 16, 39)
    assert [step["tokens"] for step in data["steps"]] == [39, 40]


def test_a_difference_is_an_exit_status_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = FunctionalCore._write_lines
    monkeypatch.setattr(
        FunctionalCore,
        "_write_lines",
        lambda self, address, data: write(self, address, bytes([data[0] ^ 1]) + data[1:]),
    )
    status, data = run_json(capsys, *SMALL)
    assert (status, data["match"]) == (1, False)
    assert main(["attention", *SMALL]) == 1
    assert "1 steps DIFFER" in capsys.readouterr().out


def saved(folder: Path, **arrays: Any) -> Path:
    file = folder / "bad.npz"
    np.savez(file, **arrays)
    return file


Q, KV = np.zeros((2, 8)), np.zeros((5, 1, 8))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"q": Q, "k": KV}, "no array 'v', only k, q; it needs q, k, v"),
        ({}, "no array 'q', only none"),
        ({"q": Q, "k": KV, "v": KV[:4]}, "give q as (heads, head_dim)"),
        ({"q": Q, "k": KV[:, 0], "v": KV[:, 0]}, "give q as (heads, head_dim)"),
        ({"q": np.zeros((2, 9)), "k": KV, "v": KV}, "all with the same head_dim"),
        ({"q": np.zeros((0, 8)), "k": KV, "v": KV}, "q (1, 0, 8)"),
        ({"q": np.zeros((3, 8)), "k": np.zeros((5, 2, 8)), "v": np.zeros((5, 2, 8))}, "not a multiple of 2 KV heads"),
        ({"q": np.zeros((6, 2, 8)), "k": KV, "v": KV}, "6 steps need at least as many tokens, there are 5"),
        ({"q": Q + np.nan, "k": KV, "v": KV}, "q has 16 values that FP16 cannot hold"),
        ({"q": Q, "k": KV + 1e6, "v": KV}, "k has 40 values that FP16 cannot hold"),
        ({"q": np.full((2, 8), "x"), "k": KV, "v": KV}, "save it as numbers"),
        ({"q": np.full((2, 8), None), "k": KV, "v": KV}, "no whole npz file of plain arrays"),
        ({"q": np.zeros((1, 300)), "k": np.zeros((5, 1, 300)), "v": np.zeros((5, 1, 300))}, "head_dim is 300"),
    ],
)
def test_files_that_cannot_be_used_are_refused_by_what_is_wrong(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arrays: dict[str, Any], message: str
) -> None:
    check_refused(capsys, message, "--input", str(saved(tmp_path, **arrays)), "--preset", "tiny")


@pytest.mark.parametrize("content", [b"", b"PK\3\4 and nothing", b"text"])
@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_damaged_files_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes, kind: str
) -> None:
    file = tmp_path / f"qkv.{kind}"
    file.write_bytes(content)
    check_refused(capsys, f"{file}: ", "--input", str(file))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--input", "/nowhere.npz"), "/nowhere.npz: cannot be read"),
        (("--input", "/nowhere.safetensors"), "/nowhere.safetensors: cannot be read"),
        (("--input", "x.npz", "--tokens", "5"), "--input has the shape: leave out --tokens"),
        (("--input", "x.npz", "--model", "llama2-7b"), "--input has the shape: leave out --model"),
        (("--model", "llama2-7b", "--heads", "4"), "--model has the shape of a head: leave out --heads"),
        (("--model", "llama9"), "llama9"),
        (("--heads", "3"), "--heads 3: choose a multiple of --kv-heads 2"),
        (("--heads", "0"), "--heads 0: choose 1 ... 1024"),
        (("--heads", "2", "--kv-heads", "4"), "--kv-heads 4: choose 1 ... 2"),
        (("--head-dim", "257"), "--head-dim 257: choose 1 ... 256"),
        (("--tokens", "0"), "--tokens 0: choose 1"),
        (("--steps", "0"), "--steps 0: choose 1"),
        (("--devices", "0"), "--devices 0: choose 1 ... 64"),
        (("--gpu-tokens", "-1"), "--gpu-tokens -1: choose 0 ... 512"),
        (("--gpu-tokens", "513"), "--gpu-tokens 513: choose 0 ... 512"),
        (("--tile-tokens", "33"), "KV tiles of 33 tokens: choose a multiple of 32"),
        (("--seed", "-1"), "--seed -1"),
        (("--dtype", "bf16", "--kv-dtype", "int8"), "--kv-dtype int8: with --dtype bf16 the devices hold that"),
        (("--device", "gpu"), "--device"),
        (("--preset", "huge"), "unknown device preset 'huge'"),
        (("--preset", "tiny", "--tokens", "20000"), "device memory is full: KV cache"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    check_refused(capsys, message, *arguments)


def check_refused(capsys: pytest.CaptureFixture[str], message: str, *arguments: str) -> None:
    assert main(["attention", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1 and err.startswith("plora: error: ") and message in err, err
