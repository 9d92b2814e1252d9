"""Runs a cocotb module on a design under Verilator, without cocotb's slow defaults."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from cocotb_tools.runner import Verilator

from plora.hw.build.cache import cached, content_key
from plora.hw.build.toolchain import find_cxx, find_verilator, package_version

# The bus models in Python take nearly all of the time: compiling quickly is worth more than running quickly.
_FLAGS = ("-O3", "--no-timing", "--x-initial", "unique", "--output-split-cfuncs", "300", "-Wno-lint")
_OPTIMIZE = "-O1"


class _Runner(Verilator):
    """cocotb's runner, but only the top's ports are visible: all signals public cost a factor of ten in speed."""

    def _build_command(self) -> list[list[str]]:
        commands = super()._build_command()
        at = commands[0].index("--public-flat-rw")
        commands[0][at : at + 1] = ["--public-depth", "1"]
        return commands


def simulate(
    verilog: str, top: str, module: str, *, results: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> dict[str, float]:
    """Run the cocotb tests of ``module`` on the design and return the seconds of each.

    Args:
        verilog: text of the design.
        top: name of its top module.
        module: importable name of the module with the tests.
        results: folder for what the run writes.
        seed: decides cocotb's random choices.
        monkeypatch: undoes what is set in the environment.

    Raises:
        AssertionError: a test failed, or none ran.
    """
    verilator, (cxx, cxx_version) = find_verilator(), find_cxx()
    for name, value in verilator.environment().items():
        monkeypatch.setenv(name, value)
    # cocotb's runner calls make itself: variables can reach it only through the environment.
    variables = verilator.make_variables(cxx) | {"OPT_FAST": _OPTIMIZE}
    monkeypatch.setenv("MAKEFLAGS", " ".join(f"{name}={value}" for name, value in variables.items()))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    key = content_key(
        verilog,
        *(top, " ".join(_FLAGS), _OPTIMIZE, verilator.version, cxx_version, str(package_version("cocotb"))),
    )

    def build(work: Path) -> None:
        source = work / f"{top}.v"
        source.write_text(verilog)
        runner = _Runner()
        runner.build(
            sources=[source],
            hdl_toplevel=top,
            build_dir=work,
            build_args=list(_FLAGS),
            log_file=work / "build.log",
            always=True,
        )
        for path in work.iterdir():  # hundreds of megabytes that only the compiler needed
            if path.suffix in (".cpp", ".h", ".o", ".d", ".a", ".gch", ".mk", ".dat"):
                path.unlink()

    folder = cached(f"cocotb-{top}", key, build)
    report = results / "results.xml"
    # The runner leaves with SystemExit where a test failed; the report says which.
    with contextlib.suppress(SystemExit):
        _Runner().test(
            test_module=module,
            hdl_toplevel=top,
            hdl_toplevel_lang="verilog",
            build_dir=folder,
            test_dir=results,
            results_xml=str(report),
            seed=seed,
        )
    assert report.is_file(), f"the simulation of {module} ended without a report"
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case.get("name") for case in cases if case.find("failure") is not None or case.find("error") is not None]
    assert cases, f"no cocotb test ran in {module}"
    assert not failed, f"cocotb tests failed: {failed}"
    return {str(case.get("name")): float(case.get("time", "0")) for case in cases}
