"""What an installation holds: `pip install .` must bring everything that the packages read."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LAYERS = ("hw", "sim", "sw", "synth")


def _files(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_an_installation_has_every_file_of_every_layer(repository: Path, tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="setuptools, which pip brings along to build, is not installed here")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(repository / name, source)
    for layer in LAYERS:
        shutil.copytree(repository / layer, source / layer, ignore=shutil.ignore_patterns("__pycache__"))
    run = subprocess.run(
        [sys.executable, "setup.py", "-q", "build", "--build-lib", str(tmp_path / "built")],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    for layer in LAYERS:
        missing = _files(repository / layer) - _files(tmp_path / "built" / "plora" / layer)
        assert not missing, f"setup.py leaves out of {layer}/: {sorted(missing)}"
