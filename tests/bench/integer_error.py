"""What INT8 and INT4 keys and values cost in accuracy: `python -m tests.bench.integer_error`.

Attention by the golden functions, which the RTL equals bit for bit, against float64 on the keys and values as they
were. Operands are normal, q times ``spread`` (`tests.bench.softmax_error`); *outliers*: one dim of keys in sixteen
is eight times as large, as in trained models. Beside it, in float64, the same with scales that are FP16 numbers: what
the byte of a scale costs.
"""

from __future__ import annotations

import argparse
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plora.hw.defs.config import preset
from plora.hw.defs.descriptor import DType
from plora.hw.defs.integers import INTEGER_BITS
from plora.hw.defs.queue import softmax_scale, softmax_scale_value
from plora.sim.golden.integers import dequantize, quantize
from plora.sim.golden.softmax import golden_attention, merge_partials

Floats = npt.NDArray[np.float64]

CONFIG = preset("full")
HEAD_DIM = 128
ROWS = 32
OUTLIERS, OUTLIER_SIZE = 16, 8.0


class IntegerError(NamedTuple):
    """Errors of attention in one case, relative to the rms of the exact output.

    ``rms``, ``largest``: of the device; ``from_fp16``: rms of its distance from the device's output over FP16 keys and
    values; ``fp16``: rms of the error of that; ``wide_scales``: rms of exact attention with FP16 scales.
    """

    rms: float
    largest: float
    from_fp16: float
    fp16: float
    wide_scales: float


def exact(q: Floats, k: Floats, v: Floats) -> Floats:
    """Attention in float64."""
    t = q @ k.T * math.log2(math.e) / math.sqrt(HEAD_DIM)
    p = np.exp2(t - t.max(axis=1, keepdims=True))
    return np.asarray(p @ v / p.sum(axis=1, keepdims=True))


def with_wide_scales(rows: Floats, dtype: DType) -> Floats:
    """``rows`` as integers whose scales are the least FP16 numbers that hold them."""
    steps = (1 << INTEGER_BITS[dtype] - 1) - 1
    wanted = np.abs(rows).max(axis=1, keepdims=True) / steps
    scales = wanted.astype(np.float16)
    scales = np.where(scales < wanted, np.nextafter(scales, np.float16(np.inf)), scales).astype(np.float64)
    return np.asarray(np.rint(rows / scales) * scales)


def integer_error(dtype: DType, tokens: int, spread: float, *, outliers: bool = False) -> IntegerError:
    """Return the errors of one case."""
    rng = np.random.default_rng([tokens, round(100 * spread), outliers])
    q = (spread * rng.normal(size=(ROWS, HEAD_DIM))).astype(np.float16)
    size = np.ones(HEAD_DIM)
    if outliers:
        size[::OUTLIERS] = OUTLIER_SIZE
    k = (size * rng.normal(size=(tokens, HEAD_DIM))).astype(np.float16)
    v = rng.normal(size=(tokens, HEAD_DIM)).astype(np.float16)
    scale = softmax_scale_value(softmax_scale(math.log2(math.e) / math.sqrt(HEAD_DIM)))

    def device(keys: npt.NDArray[np.float16], values: npt.NDArray[np.float16]) -> Floats:
        return merge_partials([golden_attention(q, keys, values, scale, CONFIG).partial])

    wide = [each.astype(np.float64) for each in (q, k, v)]
    wanted = exact(*wide)
    plain = device(k, v)
    found = device(dequantize(quantize(k, dtype)), dequantize(quantize(v, dtype)))
    other = exact(wide[0], with_wide_scales(wide[1], dtype), with_wide_scales(wide[2], dtype))

    def rms(error: Floats) -> float:
        return float(np.sqrt(np.mean(error**2) / np.mean(wanted**2)))

    largest = float(np.abs(found - wanted).max() / np.sqrt(np.mean(wanted**2)))
    return IntegerError(rms(found - wanted), largest, rms(found - plain), rms(plain - wanted), rms(other - wanted))


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("| keys | spread | tokens | FP16 rms | INT8 rms | max | FP16 scales | INT4 rms | max | FP16 scales |")
    print("|------|--------|--------|----------|----------|-----|-------------|----------|-----|-------------|")
    for outliers in (False, True):
        for spread in (1.0, 4.0):
            for tokens in (128, 1024, 8192):
                found = [integer_error(dtype, tokens, spread, outliers=outliers) for dtype in (DType.INT8, DType.INT4)]
                cells = [f"{found[0].fp16:.2%}"]
                for e in found:
                    cells += [f"{e.rms:.2%}", f"{e.largest:.1%}", f"{e.wide_scales:.2%}"]
                kind = "outliers" if outliers else "normal"
                print(f"| {kind} | {spread} | {tokens} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
