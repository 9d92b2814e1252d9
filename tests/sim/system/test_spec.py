from __future__ import annotations

import re
from pathlib import Path

import pytest

from plora.hw.defs.errors import UserError
from plora.sim.system.config import RunOptions, resolve
from plora.sim.system.decode import decode_run
from plora.sim.system.spec import bundled_systems, load_system

PAPER = {
    "plora",
    "pure-cxl",
    "s-lora",
    "s-lora-4gpu",
    "cpu-lora-offload",
    "grace-hopper",
    "plora-nocxl",
    "n-e3",
    "n-e4",
    "ns",
    "nd-e3",
    "nd-e4",
}


def test_every_system_of_the_paper_and_the_honest_bounds_are_there() -> None:
    assert PAPER | {"all-hbm", "pure-cxl-cached", "punica", "dlora", "caraserve"} == set(bundled_systems())


@pytest.mark.parametrize("name", bundled_systems())
def test_bundled_systems_load_under_their_own_name(name: str) -> None:
    spec = load_system(name)
    assert spec.name == name
    assert len(spec.source) > 20


def test_nsd_is_plora() -> None:
    assert load_system("nsd") == load_system("plora")


def _write(tmp_path: Path, change: tuple[str, str]) -> Path:
    text = (Path(__file__).parents[3] / "sim/system/data/systems/plora.toml").read_text()
    assert change[0] in text
    path = tmp_path / "own.toml"
    path.write_text(text.replace(*change))
    return path


def test_the_system_in_the_documentation_is_one_and_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/system-model.md").read_text()
    (block,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    path = tmp_path / "half-pool.toml"
    path.write_text(block)
    resolved = resolve(RunOptions(systems=(str(path),), num_devices=2, steps=1, batch_size=4))
    assert decode_run(resolved, resolved.systems[0]).strategy_counts()["E1"] == 0


def test_a_users_file_is_a_system(tmp_path: Path) -> None:
    path = _write(tmp_path, ('title = "PLoRA (NSD)"', 'title = "Mine"'))
    assert load_system(path).title == "Mine"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('memory = "devices"', 'memory = "devices"\nspeed = 3'), "unknown field `speed`"),
        (('memory = "devices"', 'memory = "tape"'), "Invalid enum value"),
        (('compute = "ndp"', 'compute = "none"'), "E3 and E4 need far.compute"),
        (('strategies = ["E1", "E2", "E3", "E4"]', "strategies = []"), "at least one"),
        (('strategies = ["E1", "E2", "E3", "E4"]', 'strategies = ["E1", "E1"]'), "at most once"),
        (('home = "far"\nattention', 'home = "hbm"\nattention'), "distributed attention needs"),
        (("count = 1", "count = 0"), "gpus.count is 0"),
        (('memory = "devices"', 'memory = "host"'), "does not go with"),
        (
            ('strategies = ["E1", "E2", "E3", "E4"]', 'strategies = ["E1"]\nmerge = true'),
            "merge needs adapters.home hbm",
        ),
        (
            ('strategies = ["E1", "E2", "E3", "E4"]', 'strategies = ["E1"]\ncold_start_tflops = 3.0'),
            "cold_start_tflops needs",
        ),
    ],
)
def test_a_system_that_makes_no_sense_is_refused_in_one_line(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_system(_write(tmp_path, change))
    assert "own.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"unknown system 'warp'; known: all-hbm, .*plora"):
        load_system("warp")
