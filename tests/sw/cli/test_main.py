"""The manner of speaking that all verbs share: one JSON object, one error line, nothing half-written."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plora.hw.defs.errors import UserError
from plora.sw import cli
from plora.sw.cli.command import CommandParser, Result, as_json, say
from plora.sw.version import plora_version

RunVerb = Callable[[argparse.Namespace], Result]
Install = Callable[..., None]


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs the verb ``probe`` with a given ``run``."""

    def install(run: RunVerb, nested: bool = False) -> None:
        module = types.ModuleType("plora_probe_verb")
        module.__spec__ = ModuleSpec(module.__name__, None)

        def configure(parser: CommandParser) -> None:
            if nested:
                for action in parser.add_nested({"one": "the first", "two": "the second"}).values():
                    action.add_argument("--size", type=int, default=1)
            else:
                parser.add_argument("--size", type=int, default=1)

        module.__dict__.update(SUMMARY="a verb for tests", configure=configure, run=run)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(cli.VERBS, "probe", module.__name__)

    return install


def result(args: argparse.Namespace) -> Result:
    say("working")
    return Result(
        data={"size": args.size, "share": np.float32(0.5), "row": np.arange(3), "where": Path("/x")},
        text=f"size {args.size}",
        files={"table.csv": "a,b\n", "deep/raw.bin": b"\0\1"},
    )


def test_json_is_one_object_and_all_that_is_on_standard_output(
    verb: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    verb(result)
    assert cli.main(["probe", "--size", "4", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {
        "command": "probe",
        "version": plora_version(),
        "size": 4,
        "share": 0.5,
        "row": [0, 1, 2],
        "where": "/x",
    }
    assert captured.err == "working\n"


def test_text_is_printed_without_json(verb: Install, capsys: pytest.CaptureFixture[str]) -> None:
    verb(result)
    assert cli.main(["probe"]) == 0
    assert capsys.readouterr().out == "size 1\n"


@pytest.mark.parametrize("line", [["--json", "two"], ["two", "--json"], ["--json", "two", "--json"]])
def test_common_flags_may_stand_before_or_after_a_nested_verb(
    verb: Install, capsys: pytest.CaptureFixture[str], line: list[str]
) -> None:
    verb(result, nested=True)
    assert cli.main(["probe", *line]) == 0
    assert json.loads(capsys.readouterr().out)["command"] == "probe two"


def test_out_gets_every_file_and_nothing_temporary(
    verb: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verb(result)
    out = tmp_path / "new" / "folder"
    assert cli.main(["probe", "--json", "--out", str(out)]) == 0
    found = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert found.pop("result.json").decode() == capsys.readouterr().out
    assert found == {"result.txt": b"size 1\n", "table.csv": b"a,b\n", "deep/raw.bin": b"\0\1"}


def test_a_second_run_replaces_the_results_of_the_first(verb: Install, tmp_path: Path) -> None:
    verb(result)
    for size in ("1", "2"):
        assert cli.main(["probe", "--size", size, "--out", str(tmp_path)]) == 0
    assert (tmp_path / "result.txt").read_text() == "size 2\n"


def test_results_that_cannot_all_be_written_leave_the_old_ones(
    verb: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verb(result)
    assert cli.main(["probe", "--out", str(tmp_path)]) == 0
    (tmp_path / "deep" / "raw.bin").unlink()
    (tmp_path / "deep").rmdir()
    (tmp_path / "deep").write_text("in the way")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert cli.main(["probe", "--size", "2", "--out", str(tmp_path)]) == 2
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["file", "file/below", "dangling"])
def test_an_impossible_out_is_refused_before_the_work(
    verb: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    def never(args: argparse.Namespace) -> Result:
        raise AssertionError("the work was started")

    verb(never)
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert cli.main(["probe", "--out", str(tmp_path / place)]) == 2
    assert capsys.readouterr().err.startswith(f"plora: error: --out {tmp_path / place}: ")


def raising(error: BaseException) -> RunVerb:
    def run(args: argparse.Namespace) -> Result:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UserError("file x:\n no such thing"), 2, "plora: error: file x: no such thing\n"),
        (KeyboardInterrupt(), 130, "plora: interrupted\n"),
        (
            ValueError("oops"),
            70,
            "plora: internal error: ValueError: oops (--debug shows the traceback)\n",
        ),
    ],
)
def test_errors_are_one_line(
    verb: Install, capsys: pytest.CaptureFixture[str], error: BaseException, status: int, line: str
) -> None:
    verb(raising(error))
    assert cli.main(["probe", "--json"]) == status
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", line)


def test_debug_shows_the_traceback(
    verb: Install, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    verb(raising(ValueError("oops")))
    assert cli.main(["probe", "--debug"]) == 70
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("PLORA_DEBUG", "1")
    assert cli.main(["probe"]) == 70
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ([], "the following arguments are required: VERB"),
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["--nonsense"], "required: VERB"),
        (["probe", "--size", "x"], "argument --size: invalid int value: 'x'"),
        (["probe", "--siz", "1"], "unrecognized arguments: --siz 1"),
        (["probe", "--out"], "argument --out: expected one argument"),
        (["rtl"], "the following arguments are required: COMMAND"),
        (["rtl", "nonsense"], "invalid choice: 'nonsense'"),
        (["rtl", "emit", "--preset", "huge"], "unknown device preset 'huge'; choose one of tiny, small, full"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line_and_status_2(
    verb: Install, capsys: pytest.CaptureFixture[str], line: list[str], message: str
) -> None:
    verb(result)
    assert cli.main(line) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("plora: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_the_exit_status_of_a_result_is_that_of_the_program(verb: Install) -> None:
    verb(lambda args: Result(data={}, text="differs", exit_status=1))
    assert cli.main(["probe"]) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("-inf")])
def test_numbers_that_json_cannot_hold_are_never_printed(value: Any) -> None:
    with pytest.raises(ValueError, match=r"result\.a\[1\]\.b is -?(nan|inf)"):
        as_json({"a": [1, {"b": value}]})


def test_values_that_json_cannot_hold_are_named() -> None:
    with pytest.raises(TypeError, match=r"result\.a is a set"):
        as_json({"a": {1}})


def plora(*line: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "plora.sw.cli", *line], capture_output=True, text=True, check=False, **options
    )


@pytest.mark.parametrize("verb_name", list(cli.VERBS))
def test_every_verb_explains_itself(verb_name: str) -> None:
    done = plora(verb_name, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: plora {verb_name}")
    assert "--json" in done.stdout and "--out DIR" in done.stdout


def test_help_is_quick_and_loads_no_models_or_hardware_tools() -> None:
    script = (
        "import sys\n"
        "from plora.sw.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "heavy = {'numpy', 'amaranth', 'cocotb', 'safetensors', 'msgspec'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )

    def children_seconds() -> float:
        # Processor time, not wall time: how busy the machine is says nothing of the program.
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    start = children_seconds()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    seconds = children_seconds() - start
    assert done.returncode == 0, done.stderr
    assert all(f"  {name} " in done.stdout for name in cli.VERBS)
    assert seconds < 1.0


def test_version() -> None:
    assert plora("--version").stdout == f"plora {plora_version()}\n"


def test_a_reader_that_goes_away_is_not_an_error() -> None:
    # The pipe's reading end is closed before anything is printed.
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        done = subprocess.run(
            [sys.executable, "-m", "plora.sw.cli", "defs"],
            stdout=stream,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (141, "")
