"""`plora synth`: its flags, and the cheapest of its answers."""

from __future__ import annotations

import json

import pytest

from plora.sw import cli


def test_the_units_of_a_device_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["synth", "--preset", "tiny", "--list-units", "--json"]) == 0
    units = json.loads(capsys.readouterr().out)["units"]
    assert "pe.dot" in {unit["name"] for unit in units}


def test_power_of_a_single_unit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["synth", "--preset", "tiny", "--power", "--unit", "pe.dot"]) == 2
    assert "--power is of the whole device" in capsys.readouterr().err
