"""GPU data, kernels in both modes, whole decode steps, and the fit behind them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plora.hw.defs.errors import UserError
from plora.sim.calibration import gpu as gpu_fit
from plora.sim.calibration.leastsquares import errors, fit_log, held_out
from plora.sim.hardware import kernels
from plora.sim.hardware.gpu import GpuMode, load_gpu, load_gpus, roofline_ns
from plora.sim.hardware.gpu_step import Prefill, decode_step_time, step_time
from plora.sim.hardware.link import load_link
from plora.sim.llm import load_model

H100 = load_gpu("h100-sxm")
MODES: tuple[GpuMode, ...] = ("roofline", "calibrated")


@pytest.mark.parametrize("name", ["h100-sxm", "h200-sxm", "a100", "gb200", "rtx-pro-6000"])
def test_bundled_gpus_name_their_sources_and_a_fabric_that_exists(name: str) -> None:
    gpu = load_gpu(name)
    load_link(gpu.fabric)
    assert all(len(fact.source) > 5 and fact.status != "user" for fact in gpu.facts.values())
    assert kernels.calibration(gpu).origin


def test_batch_32_arithmetic_of_the_paper() -> None:
    # the paper, section VII-F: 0.45 and 0.52 ms of compute for 7B and 8B
    assert roofline_ns(H100, 0, 2 * 7e9 * 32) / 1e6 == pytest.approx(0.453, abs=0.001)
    assert roofline_ns(H100, 0, 2 * 8e9 * 32) / 1e6 == pytest.approx(0.517, abs=0.001)


@pytest.mark.parametrize(("model", "step_ms", "tokens_per_s"), [("llama2-7b", 4.18, 7657), ("llama2-13b", 7.76, 4123)])
def test_a_roofline_step_without_context_is_the_papers_hbm_floor(
    model: str, step_ms: float, tokens_per_s: float
) -> None:
    step = decode_step_time(H100, load_model(model), 32, 0, mode="roofline")
    assert step.total_ns / 1e6 == pytest.approx(step_ms, abs=0.005)
    assert 32e9 / step.total_ns == pytest.approx(tokens_per_s, abs=0.5)


REFERENCE_MS = {
    # aiconfigurator-core 0.12.0, vLLM backend, bf16, input 2048, output 128: batch 1, 16, 64
    ("llama3-8b", 1, "h100-sxm"): (6.24, 8.25, 12.68),
    ("llama3-8b", 1, "h200-sxm"): (4.91, 6.35, 9.57),
    ("llama3-8b", 1, "gb200"): (3.45, 4.18, 5.93),
    ("llama3.1-70b", 4, "h100-sxm"): (14.98, 16.62, 20.82),
    ("llama3.1-70b", 4, "h200-sxm"): (12.37, 12.73, 16.41),
    ("llama3.1-70b", 4, "gb200"): (8.81, 9.06, 11.69),
}


@pytest.mark.parametrize("case", sorted(REFERENCE_MS))
def test_calibrated_decode_steps_are_within_nine_percent_of_measured_ones(case: tuple[str, int, str]) -> None:
    model, tp, gpu = case
    for batch, reference in zip((1, 16, 64), REFERENCE_MS[case], strict=True):
        step = decode_step_time(load_gpu(gpu), load_model(model, "exact"), batch, 2048 + 64, tp=tp)
        assert step.total_ns / 1e6 == pytest.approx(reference, rel=0.09), (case, batch)


def test_the_committed_coefficients_are_what_the_tables_give(
    shared_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_fit.main(["--data", str(shared_data), "--check"]) == 0
    assert "gemm.held_out" in capsys.readouterr().out


def test_the_check_sees_a_coefficient_that_drifted() -> None:
    fits = {"h100-sxm": {"origin": "x", "errors": {}, "gemm": {"constant_us": 5.0}}}
    other = {"h100-sxm": {"origin": "x", "errors": {}, "gemm": {"constant_us": 5.1}}}
    assert gpu_fit.largest_difference(fits, other) > 0.01


@pytest.mark.parametrize(
    ("kernel", "percent"),
    [
        ("gemm", 8),
        ("lora_shrink", 15),
        ("lora_expand", 8),
        ("decode_attention", 9),
        ("prefill_attention", 7),
        ("moe", 6),
        ("moe_sharded", 14),
        ("all_reduce", 10),
    ],
)
def test_held_out_error_of_each_kernel(kernel: str, percent: float) -> None:
    assert kernels.calibration(H100).errors[f"{kernel}.held_out"]["mean_abs_percent"] <= percent


def test_missing_tables_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_fit.main(["--data", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("plora: error: ")


def test_the_fit_finds_known_coefficients_again() -> None:
    x = np.linspace(1, 100, 200)
    measured = 3.0 + x * 0.25
    found = fit_log(lambda c: c["a"] + c["b"] * x, measured, {"a": 1.0, "b": 1.0})
    assert found["a"] == pytest.approx(3.0, rel=1e-4)
    assert found["b"] == pytest.approx(0.25, rel=1e-4)


def test_about_a_quarter_is_held_out_and_equal_shapes_stay_together() -> None:
    n = np.repeat(np.arange(4000.0), 2)
    mask = held_out(n)
    assert 0.2 < mask.mean() < 0.3
    assert (mask[::2] == mask[1::2]).all()


def test_errors_are_relative_and_in_percent() -> None:
    found = errors(np.array([1.1, 0.9]), np.array([1.0, 1.0]))
    assert found["mean_abs_percent"] == pytest.approx(10.0)
    assert found["bias_percent"] == pytest.approx(0.0)


@given(
    mode=st.sampled_from(MODES),
    m=st.integers(1, 8192),
    n=st.integers(64, 32768),
    k=st.integers(64, 32768),
)
def test_a_larger_gemm_never_takes_less_time(mode: GpuMode, m: int, n: int, k: int) -> None:
    base = kernels.gemm_ns(H100, m, n, k, mode)
    assert base > 0
    assert kernels.gemm_ns(H100, m + 64, n, k, mode) >= base
    assert kernels.gemm_ns(H100, m, n + 64, k, mode) >= base
    assert kernels.gemm_ns(H100, m, n, k + 64, mode) >= base


@given(m=st.integers(1, 4096), n=st.integers(512, 16384), k=st.integers(512, 16384))
def test_calibration_only_ever_adds_to_the_roofline(m: int, n: int, k: int) -> None:
    assert kernels.gemm_ns(H100, m, n, k, "calibrated") >= kernels.gemm_ns(H100, m, n, k, "roofline")


@pytest.mark.parametrize("mode", MODES)
def test_decode_attention_takes_an_array_of_contexts(mode: GpuMode) -> None:
    shape = {"query_heads": 32, "kv_heads": 8, "head_dim": 128}
    totals = np.array([1e4, 1e5, 1e6])
    many = kernels.decode_attention_ns(H100, 16, totals, mode=mode, **shape)
    one = [kernels.decode_attention_ns(H100, 16, total, mode=mode, **shape) for total in totals.tolist()]
    assert many.tolist() == pytest.approx(one)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_do_takes_no_time(mode: GpuMode) -> None:
    assert kernels.gemm_ns(H100, 0, 10, 10, mode) == 0
    assert kernels.decode_attention_ns(H100, 0, 0.0, query_heads=8, kv_heads=8, head_dim=64, mode=mode) == 0
    assert kernels.prefill_attention_ns(H100, 0, query_heads=8, kv_heads=8, head_dim=64, mode=mode) == 0
    assert kernels.all_reduce_ns(H100, load_link("nvlink4"), 1024, 1, mode) == 0
    assert step_time(H100, load_model("llama3-8b"), mode=mode).total_ns == 0


@pytest.mark.parametrize("mode", MODES)
def test_chunks_of_a_prompt_attend_as_much_as_the_prompt_at_once(mode: GpuMode) -> None:
    shape = {"query_heads": 32, "kv_heads": 8, "head_dim": 128}
    whole = kernels.prefill_attention_ns(H100, 16384, mode=mode, **shape)
    chunks = sum(kernels.prefill_attention_ns(H100, 2048, past, mode=mode, **shape) for past in range(0, 16384, 2048))
    assert whole <= chunks * 1.001 <= whole * 1.35


def test_prefill_of_a_batch_is_bound_by_arithmetic() -> None:
    model = load_model("llama2-7b")
    step = step_time(H100, model, prefills=[Prefill(256)] * 256, mode="roofline")
    assert step.linear_ns == pytest.approx(2 * 6.607e9 * 256 * 256 / 989.4e3, rel=1e-3)


def test_tensor_parallelism_must_divide_the_heads() -> None:
    with pytest.raises(UserError, match="tensor parallelism 3"):
        decode_step_time(H100, load_model("llama3-8b"), 1, 128, tp=3)


def test_tensor_parallelism_shares_the_work_and_adds_all_reduces() -> None:
    model = load_model("llama3.1-70b", "exact")
    one, four = decode_step_time(H100, model, 16, 2048), decode_step_time(H100, model, 16, 2048, tp=4)
    assert four.linear_ns < one.linear_ns / 2
    assert one.exchange_ns == 0 < four.exchange_ns


def test_a_mixture_reads_more_experts_as_the_batch_grows() -> None:
    model = load_model("qwen3-30b-a3b", "exact")
    one, many = decode_step_time(H100, model, 1, 0), decode_step_time(H100, model, 32, 0)
    assert 6 < many.moe_ns / one.moe_ns < 14


@pytest.mark.parametrize(
    ("requests_per_gpu", "step_ms"),
    [(1, 8.8), (48, 30.0), (128, 44.7)],
)
def test_steps_of_a_recorded_vllm_run(requests_per_gpu: int, step_ms: float) -> None:
    # vLLM 0.19, two RTX PRO 6000, data and expert parallel: running requests over generated tokens a
    # second in seconds without prefill; context about 1,200 tokens. The rate of exchange is fitted to the run's TPOT.
    gpu, model = load_gpu("rtx-pro-6000"), load_model("qwen3-30b-a3b", "exact")
    step = step_time(gpu, model, decode_requests=requests_per_gpu, decode_context=1200, ep=2)
    assert step.total_ns / 1e6 == pytest.approx(step_ms, rel=0.15)


def test_expert_parallelism_needs_a_mixture_and_a_divisor() -> None:
    for model, ep in (("llama3-8b", 2), ("mixtral-8x7b", 3)):
        with pytest.raises(UserError, match="expert parallelism"):
            step_time(H100, load_model(model), decode_requests=1, decode_context=1, ep=ep)


def test_int8_kv_halves_attention_reading() -> None:
    model = load_model("llama2-7b")
    full = decode_step_time(H100, model, 32, 4096, mode="roofline").attention_ns
    half = decode_step_time(H100, model, 32, 4096, mode="roofline", kv_dtype="int8").attention_ns
    assert half == pytest.approx(full / 2)


@pytest.mark.parametrize(
    "call", [lambda: kernels.gemm_ns(H100, -1, 1, 1, "roofline"), lambda: roofline_ns(H100, -1, 0)]
)
def test_negative_work_is_refused(call: object) -> None:
    assert callable(call)
    with pytest.raises(UserError, match="at least 0"):
        call()


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(UserError, match="unknown GPU mode 'exact'"):
        kernels.gemm_ns(H100, 1, 1, 1, "exact")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ("hbm_gb_per_s = nan", "hbm_gb_per_s is nan"),
        ("fp16_tflops = 0", "fp16_tflops is 0"),
        ("hbm_bytes = -80e9", "hbm_bytes"),
        ("reserve_bytes = 1e12", "reserve_bytes"),
        ("hbm_gbps = 3", "hbm_gbps"),
        ('sms = "many"', "sms"),
    ],
)
def test_bad_gpu_data_names_the_key(tmp_path: Path, change: str, word: str) -> None:
    lines = {"hbm_gb_per_s": "3350", "hbm_bytes": "80e9", "fp16_tflops": "989"}
    key, value = change.split(" = ", 1)
    lines[key] = value
    path = tmp_path / "gpus.toml"
    path.write_text("[mine]\n" + "\n".join(f"{k} = {v}" for k, v in lines.items()))
    with pytest.raises(UserError, match=word):
        load_gpus(path)


def test_a_users_gpu_needs_three_numbers(tmp_path: Path) -> None:
    path = tmp_path / "gpus.toml"
    path.write_text("[mine]\nhbm_gb_per_s = 1000\nhbm_bytes = 24e9\nfp16_tflops = 100\n")
    assert roofline_ns(load_gpu("mine", path), 1e6, 0) == 1000


def test_an_unknown_gpu_or_calibration_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown GPU 'h900'; known: .*h100-sxm"):
        load_gpu("h900")
    path = tmp_path / "gpus.toml"
    path.write_text('[mine]\nhbm_gb_per_s = 1\nhbm_bytes = 8e9\nfp16_tflops = 1\ncalibration = "x"\n')
    with pytest.raises(UserError, match="unknown GPU calibration 'x'; known: h100-sxm"):
        kernels.gemm_ns(load_gpu("mine", path), 1, 1, 1, "calibrated")
