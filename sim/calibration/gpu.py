"""Fits the GPU kernel model to measured H100 tables and writes the committed coefficients.

    python -m plora.sim.calibration.gpu --data DIR [--check]

`DIR` holds the folder ``profiling`` with the tables of aiconfigurator-core 0.12.0 (vLLM 0.24
backend, H100 SXM; Apache-2.0) that docs/models.md lists. A quarter of the shapes is held out of
each fit. ``--check`` compares with the committed file instead of writing it and exits 1 if they
differ by more than rounding.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from plora.hw.defs.errors import UserError
from plora.sim.calibration.leastsquares import FloatArray, errors, fit_log, held_out
from plora.sim.hardware import kernels
from plora.sim.hardware.gpu import load_gpu
from plora.sim.hardware.kernels import Rates

RESULT = Path(kernels.__file__).parent / "data" / "gpu_calibration.json"

ORIGIN = "aiconfigurator-core 0.12.0, vLLM 0.24 backend, H100 SXM (Apache-2.0); a quarter of the shapes held out"

# aiconfigurator's own correction for memory-bound kernels (systems/h100_sxm.yaml), taken as it is
ELEMENTWISE = {"constant_us": 3.0, "memory_efficiency": 0.8}

Mask = npt.NDArray[np.bool_]
Errors = dict[str, dict[str, float]]


class Table:
    """Columns of one CSV file, plain or gzipped."""

    def __init__(self, path: Path) -> None:
        try:
            opener: Any = gzip.open if path.suffix == ".gz" else open
            with opener(path, "rt", newline="") as handle:
                self._rows = list(csv.DictReader(handle))
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error}); give --data the folder that holds profiling/") from None
        self._path = path

    def __getitem__(self, name: str) -> FloatArray:
        return np.array([float(value) for value in self.text(name)])

    def text(self, name: str) -> list[str]:
        """A column as it is written."""
        if not self._rows or name not in self._rows[0]:
            raise UserError(f"{self._path}: no column {name!r}; use the tables that docs/models.md names")
        return [row[name] for row in self._rows]


def _fit(
    name: str,
    kind: type[Any],
    model: Callable[[Any], FloatArray],
    measured: FloatArray,
    held: Mask,
    start: Mapping[str, float],
    report: Errors,
) -> dict[str, float]:
    """Fit on the rows not held out, record both errors, return coefficients rounded as committed."""

    def fitted(values: Mapping[str, float]) -> FloatArray:
        return model(kind(**values))[~held]

    found = {key: float(f"{value:.4g}") for key, value in fit_log(fitted, measured[~held], start).items()}
    predicted = model(kind(**found))
    report[f"{name}.fitted"] = errors(predicted[~held], measured[~held])
    report[f"{name}.held_out"] = errors(predicted[held], measured[held])
    return found


def _gemm(data: Path, at: Rates, report: Errors) -> dict[str, float]:
    table = Table(data / "h100_sxm_vllm0.24.0_gemm_bf16_subset.csv.gz")
    m, n, k, measured = table["m"], table["n"], table["k"], 1e3 * table["latency"]
    use = (n >= 512) & (k >= 512)
    m, n, k, measured = m[use], n[use], k[use], measured[use]
    found = _fit(
        "gemm",
        kernels.GemmFit,
        lambda fit: kernels.gemm_us(fit, at, m, n, k),
        measured,
        held_out(n, k),
        {"constant_us": 4.0, "memory_efficiency": 0.9, "compute_efficiency": 0.8, "sharpness": 3.0},
        report,
    )
    report["gemm.vidur_not_fitted"] = _vidur(data / "vidur_h100", kernels.GemmFit(**found), at)
    return found


def _vidur(tables: Path, fit: kernels.GemmFit, at: Rates) -> dict[str, float]:
    """Error of the GEMM coefficients on another profile of the same GPU: Vidur's H100 tables, whole models."""
    predicted, measured = [], []
    for name in ("Llama-2-7b-hf_mlp.csv", "Llama-2-70b-hf_mlp.csv"):
        table = Table(tables / name)
        m, hidden, inter, tp = (
            table[k] for k in ("num_tokens", "n_embd", "n_expanded_embd", "num_tensor_parallel_workers")
        )
        width = hidden / table["n_head"]
        kv = table["n_kv_head"] * width
        shapes = {
            "attn_pre_proj": ((hidden + 2 * kv) / tp, hidden),
            "attn_post_proj": (hidden, hidden / tp),
            "mlp_up_proj": (2 * inter / tp, hidden),
            "mlp_down_proj": (hidden, inter / tp),
        }
        for kernel, (n, k) in shapes.items():
            predicted.append(kernels.gemm_us(fit, at, m, n, k))
            measured.append(1e3 * table[f"time_stats.{kernel}.median"])
    return errors(np.concatenate(predicted), np.concatenate(measured))


def _lora(data: Path, at: Rates, role: str, report: Errors) -> dict[str, float]:
    table = Table(data / "lora_shaped_gemm_h100_h200.csv")
    m, n, k, measured = table["m_tokens"], table["n"], table["k"], table["latency_us"]
    gpu, roles = np.array(table.text("gpu")), np.array(table.text("role"))
    near = np.maximum(n, k) <= 16384
    use = (roles == role) & (gpu == "h100") & near
    found = _fit(
        f"lora_{role}",
        kernels.LoraGemmFit,
        lambda fit: kernels.lora_gemm_us(fit, at, m[use], n[use], k[use]),
        measured[use],
        held_out(n[use], k[use]),
        {
            "constant_us": 2.5,
            "memory_efficiency": 0.7,
            "compute_efficiency": 0.5,
            "sharpness": 2.0,
            "us_per_1k_depth": 0.2,
        },
        report,
    )
    # the same coefficients at another data sheet's rates, measured: what scaling to other GPUs is worth
    other = (roles == role) & (gpu == "h200") & near
    h200 = kernels.rates(load_gpu("h200-sxm"))
    predicted = kernels.lora_gemm_us(kernels.LoraGemmFit(**found), h200, m[other], n[other], k[other])
    report[f"lora_{role}.h200_scaled"] = errors(predicted, measured[other])
    return found


def _decode_attention(data: Path, at: Rates, report: Errors) -> dict[str, float]:
    table = Table(data / "h100_sxm_vllm0.24.0_decode_attention_bf16_hd128_subset.csv.gz")
    batch, heads, context = table["batch_size"], table["num_key_value_heads"], table["isl"] + table["step"]
    kv_bytes = 2 * batch * context * heads * table["head_dim"] * kernels.FP16_BYTES
    return _fit(
        "decode_attention",
        kernels.DecodeAttentionFit,
        lambda fit: kernels.decode_attention_us(fit, at, batch * heads, kv_bytes),
        1e3 * table["latency"],
        held_out(batch, context, heads, table["num_heads"]),
        {"constant_us": 11.0, "us_per_wave": 3.5, "memory_efficiency": 0.9, "sharpness": 2.0},
        report,
    )


def _prefill_attention(data: Path, at: Rates, report: Errors) -> dict[str, float]:
    table = Table(data / "h100_sxm_vllm0.24.0_prefill_attention_bf16_hd128_subset.csv.gz")
    batch, length, query, kv = table["batch_size"], table["isl"], table["num_heads"], table["num_key_value_heads"]
    width = table["head_dim"]
    moved = 2 * kernels.FP16_BYTES * batch * length * width * (query + kv)
    operations = 4 * batch * query * width * length * (length + 1) / 2
    return _fit(
        "prefill_attention",
        kernels.PrefillAttentionFit,
        lambda fit: kernels.prefill_attention_us(fit, at, batch * kv, moved, operations),
        1e3 * table["latency"],
        held_out(batch, length, query, kv),
        {
            "constant_us": 11.0,
            "us_per_wave": 3.0,
            "memory_efficiency": 0.5,
            "compute_efficiency": 0.7,
            "sharpness": 1.5,
        },
        report,
    )


def _moe(data: Path, at: Rates, report: Errors) -> tuple[dict[str, float], dict[str, float]]:
    """Coefficients of whole layers and of tensor- or expert-parallel shards."""
    table = Table(data / "h100_sxm_vllm0.24.0_moe_bf16.csv.gz")
    tokens, hidden, width = table["num_tokens"], table["hidden_size"], table["inter_size"]
    top_k, experts = table["topk"], table["num_experts"]
    tp, ep, measured = table["moe_tp_size"], table["moe_ep_size"], 1e3 * table["latency"]
    law = np.array(table.text("distribution"))
    inter, routed, local = width / tp, tokens * top_k / ep, experts / ep
    # Two of the table's shapes belong to models whose experts have two matrices, not three.
    gated = ~(((hidden == 2048) & (width == 5120)) | (hidden == 2688))
    spread = np.minimum(local, np.maximum(1.0, routed))
    uniform = local * (1 - (1 - top_k / experts) ** tokens)

    def model(fit: kernels.MoeFit, use: Mask, distinct: FloatArray) -> FloatArray:
        found: FloatArray = kernels.moe_us(
            fit,
            at,
            tokens=tokens[use],
            routed=routed[use],
            distinct=distinct[use],
            hidden=hidden[use],
            inter=inter[use],
            top_k=top_k[use],
        )
        return found

    start = {
        "constant_us": 25.0,
        "memory_efficiency": 0.9,
        "compute_efficiency": 0.6,
        "activation_efficiency": 1.0,
        "sharpness": 2.0,
        "pad_rows": 16.0,
    }
    whole = (tp == 1) & (ep == 1)

    def fit_part(name: str, part: Mask) -> dict[str, float]:
        use = part & gated & (law == "balanced")
        held = held_out(hidden[use], width[use], top_k[use], experts[use], tp[use], ep[use], tokens[use])
        return _fit(name, kernels.MoeFit, lambda fit: model(fit, use, spread), measured[use], held, start, report)

    found = fit_part("moe", whole), fit_part("moe_sharded", ~whole)
    fit = kernels.MoeFit(**found[0])
    skewed = gated & (law != "balanced") & whole
    report["moe.power_law_routing_not_fitted"] = errors(model(fit, skewed, uniform), measured[skewed])
    return found


def _all_reduce(data: Path, report: Errors) -> dict[str, float]:
    table = Table(data / "h100_sxm_vllm0.24.0_custom_allreduce.csv")
    graph = np.array(table.text("backend")) == "vllm_graph"
    gpus, size, measured = table["num_gpus"][graph], table["message_size"][graph], 1e3 * table["latency"][graph]
    return _fit(
        "all_reduce",
        kernels.AllReduceFit,
        lambda fit: kernels.all_reduce_us(fit, 450.0, gpus, size),
        measured,
        held_out(gpus, size),
        {"constant_us": 4.0, "us_per_doubling": 0.3, "wire_scale": 3.0, "wire_exponent": 0.95},
        report,
    )


def calibrate(data: Path) -> dict[str, Any]:
    """Fit every kernel to the tables in ``data/profiling``; returns the content of the committed file."""
    tables = data / "profiling"
    at = kernels.rates(load_gpu("h100-sxm"))
    report: Errors = {}
    moe, moe_sharded = _moe(tables, at, report)
    entry: dict[str, Any] = {
        "origin": ORIGIN,
        "gemm": _gemm(tables, at, report),
        "lora_shrink": _lora(tables, at, "shrink", report),
        "lora_expand": _lora(tables, at, "expand", report),
        "decode_attention": _decode_attention(tables, at, report),
        "prefill_attention": _prefill_attention(tables, at, report),
        "moe": moe,
        "moe_sharded": moe_sharded,
        "all_reduce": _all_reduce(tables, report),
        "elementwise": ELEMENTWISE,
        "errors": report,
    }
    return {"h100-sxm": entry}


def largest_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Largest relative difference between the coefficients of two results."""
    worst = 0.0
    for gpu, entry in one.items():
        for kernel, fit in entry.items():
            if kernel in ("origin", "errors"):
                continue
            for name, value in fit.items():
                worst = max(worst, abs(value / other[gpu][kernel][name] - 1))
    return worst


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m plora.sim.calibration.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder that holds profiling/")
    parser.add_argument("--check", action="store_true", help="compare with the committed coefficients")
    options = parser.parse_args(arguments)
    try:
        result = calibrate(options.data)
    except UserError as error:
        print(f"plora: error: {error}", file=sys.stderr)
        return 2
    for name, found in result["h100-sxm"]["errors"].items():
        print(
            f"{name:38s} {found['cases']:6.0f} cases  mean {found['mean_abs_percent']:6.2f} %  "
            f"p90 {found['p90_abs_percent']:6.2f} %  max {found['max_abs_percent']:7.2f} %  "
            f"bias {found['bias_percent']:+6.2f} %"
        )
    if options.check:
        worst = largest_difference(json.loads(RESULT.read_text(encoding="utf-8")), result)
        print(f"largest difference from the committed coefficients: {100 * worst:.3g} %")
        return 0 if worst < 0.01 else 1
    msgspec.json.decode(json.dumps(result), type=dict[str, kernels.Calibration])
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {RESULT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
