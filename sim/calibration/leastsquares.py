"""Levenberg-Marquardt on logarithms, in numpy, deterministic.

All coefficients here are positive and errors relative, so the fit is of log(model / measured) over
the logarithms of the coefficients.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

_STEP = 1e-5
_BOUND = 9.0  # coefficients stay within e**-9 ... e**9 of 1, beyond which powers overflow


def fit_log(
    model: Callable[[Mapping[str, float]], FloatArray], measured: FloatArray, start: Mapping[str, float]
) -> dict[str, float]:
    """Coefficients by name that minimise the sum of squares of log(model / measured).

    `model` maps coefficients to predictions (n,); `start` names them and gives first guesses.
    """
    names = list(start)
    target = np.log(measured)

    def residual(x: FloatArray) -> FloatArray:
        values = np.exp(np.clip(x, -_BOUND, _BOUND)).tolist()
        return np.log(model(dict(zip(names, values, strict=True)))) - target

    x = np.log(np.array([start[name] for name in names]))
    r = residual(x)
    cost, damping = float(r @ r), 1e-2
    for _ in range(300):
        jacobian = np.empty((len(r), len(x)))
        for column in range(len(x)):
            moved = x.copy()
            moved[column] += _STEP
            jacobian[:, column] = (residual(moved) - r) / _STEP
        normal, gradient = jacobian.T @ jacobian, jacobian.T @ r
        for _ in range(25):
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -gradient)
            trial = residual(x + step)
            trial_cost = float(trial @ trial)
            if np.isfinite(trial_cost) and trial_cost < cost:
                break
            damping *= 4
        else:
            break
        done = cost - trial_cost < 1e-10 * cost
        x, r, cost, damping = x + step, trial, trial_cost, max(damping / 5, 1e-9)
        if done:
            break
    return dict(zip(names, np.exp(np.clip(x, -_BOUND, _BOUND)).tolist(), strict=True))


def held_out(*columns: npt.NDArray[np.generic]) -> npt.NDArray[np.bool_]:
    """True for the quarter of the rows that a fit must not see, by a hash of their key columns.

    Rows with the same key fall on the same side, so a shape is either fitted or held out.
    """
    keys = zip(*(column.tolist() for column in columns), strict=True)
    return np.array([zlib.crc32(",".join(f"{v:g}" for v in key).encode()) % 4 == 0 for key in keys])


def errors(predicted: FloatArray, measured: FloatArray) -> dict[str, float]:
    """Cases, mean absolute, 90th percentile and maximum relative error, and bias, in percent."""
    relative = predicted / measured - 1.0
    size = np.abs(relative)
    return {
        "cases": float(len(size)),
        "mean_abs_percent": round(float(100 * size.mean()), 2),
        "p90_abs_percent": round(float(100 * np.percentile(size, 90)), 2),
        "max_abs_percent": round(float(100 * size.max()), 2),
        "bias_percent": round(float(100 * relative.mean()), 2),
    }
