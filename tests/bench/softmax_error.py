"""How far the softmax unit and the attention chain are from float64: `python -m tests.bench.softmax_error`.

All by the golden functions, which the RTL equals bit for bit. Operands are normal, q times ``spread``: at 1
scores have a standard deviation of 1 in natural units, as in a trained model's moderate heads, at 16 few
tokens take everything. The scale is log2(e) / sqrt(head_dim) with the 17 significant bits that the device
uses; the float64 reference uses it with all bits.
"""

from __future__ import annotations

import argparse
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plora.hw.defs.config import preset
from plora.hw.defs.exp2 import FRACTION_BITS, VALUE_BITS
from plora.hw.defs.queue import softmax_scale
from plora.sim.golden.softmax import exp2_fp16, exp2_fraction, golden_attention, merge_partials

Floats = npt.NDArray[np.float64]

CONFIG = preset("full")
HEAD_DIM = 128
ROWS = 8


class Exp2Error(NamedTuple):
    """Relative errors of 2**f over all f, and of its FP16 rounding in ulp over all f and 26 binades."""

    largest: float
    rms: float
    fp16_ulp: float


class AttentionError(NamedTuple):
    """Errors of one case against float64.

    ``p`` and ``probability`` (p / l): the largest in FP16 ulp; ``beyond``: share of probabilities more than
    one ulp off; ``output`` and ``output_rms``: O / l, relative to the sum of p / l times abs(v); ``float16``:
    rms of the same for the exact result rounded to FP16.
    """

    p: float
    probability: float
    beyond: float
    output: float
    output_rms: float
    float16: float


def ulp(values: Floats) -> Floats:
    """Return the distance of FP16 values around positive numbers."""
    return np.asarray(2.0 ** np.maximum(np.floor(np.log2(np.maximum(values, 2.0**-100))) - 10, -24))


def exp2_error() -> Exp2Error:
    """Go through all fractions, and all binades in which p is not zero."""
    f = np.arange(1 << FRACTION_BITS)
    exact = 2.0 ** (f / 2.0**FRACTION_BITS)
    relative = exp2_fraction(f) / 2.0**VALUE_BITS / exact - 1
    worst = 0.0
    for n in range(-26, 0):
        p = exp2_fp16(f + (n << FRACTION_BITS)).view(np.float16).astype(np.float64)
        worst = max(worst, float((np.abs(p - exact * 2.0**n) / ulp(exact * 2.0**n)).max()))
    return Exp2Error(float(np.abs(relative).max()), float(np.sqrt(np.mean(relative**2))), worst)


def attention_error(tokens: int, spread: float, *, rows: int = ROWS, seed: int = 0) -> AttentionError:
    """Return the errors of one case."""
    rng = np.random.default_rng([tokens, round(100 * spread), seed])
    q = (spread * rng.normal(size=(rows, HEAD_DIM))).astype(np.float16)
    k, v = (rng.normal(size=(tokens, HEAD_DIM)).astype(np.float16) for _ in range(2))
    factor = math.log2(math.e) / math.sqrt(HEAD_DIM)
    scale = float(np.array(softmax_scale(factor), np.uint32).view(np.float32))
    result = golden_attention(q, k, v, scale, CONFIG)

    t = q.astype(np.float64) @ k.astype(np.float64).T * factor
    weights = np.exp2(t - result.state.anchor[:, None])
    total = weights.sum(axis=1, keepdims=True)
    exact, magnitude = (
        weights / total @ np.asarray(part) for part in (v.astype(np.float64), np.abs(v, dtype=np.float64))
    )
    p_error = np.abs(result.scaled - weights) / ulp(weights)
    probability = result.scaled / (result.state.total * 2.0**-24)[:, None]
    probability_error = np.abs(probability - weights / total) / ulp(weights / total)
    output = np.abs(merge_partials([result.partial]) - exact) / magnitude
    rounded = (exact.astype(np.float16) - exact) / magnitude
    return AttentionError(
        float(p_error.max()),
        float(probability_error.max()),
        float(np.mean(probability_error > 1)),
        float(output.max()),
        float(np.sqrt(np.mean(output**2))),
        float(np.sqrt(np.mean(rounded**2))),
    )


def main() -> None:
    """Print both tables."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    exp2 = exp2_error()
    print(f"2**f, relative: max {exp2.largest:.2e}, rms {exp2.rms:.2e}; p = 2**(t - M): max {exp2.fp16_ulp:.3f} ulp")
    heads = ("spread", "tokens", "p, ulp", "p/l, ulp", "> 1 ulp", "O max", "O rms", "FP16 rms")
    print("".join(f"{head:>9}" for head in heads))
    for spread in (0.1, 1.0, 4.0, 16.0):
        for tokens in (16, 128, 1024, 8192, 32768):
            e = attention_error(tokens, spread)
            print(
                f"{spread:9} {tokens:8} {e.p:8.3f} {e.probability:8.3f} {e.beyond:8.3%}"
                f" {e.output:8.1e} {e.output_rms:8.1e} {e.float16:8.1e}"
            )


if __name__ == "__main__":
    main()
