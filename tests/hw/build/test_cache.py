"""The build cache: whole results or none, each built once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plora.hw.build.cache import (
    ABANDONED_S,
    KEPT_RESULTS,
    KEPT_S,
    build_root,
    cached,
    content_key,
    sources_key,
)
from plora.hw.defs.errors import UserError


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLORA_BUILD_DIR", str(tmp_path / "builds"))
    return tmp_path / "builds"


def test_a_result_is_built_once() -> None:
    calls = []

    def build(work: Path) -> None:
        calls.append(work)
        (work / "result").write_text("here")

    first = cached("thing", "k1", build)
    assert cached("thing", "k1", build) == first
    assert (first / "result").read_text() == "here"
    assert len(calls) == 1
    assert cached("thing", "k2", build) != first
    assert len(calls) == 2


def test_a_failed_build_leaves_only_its_log(root: Path) -> None:
    def fail(work: Path) -> None:
        (work / "half").write_text("half")
        (work / "build.log").write_text("why")
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        cached("thing", "k", fail)
    assert sorted(path.name for path in root.iterdir()) == ["locks", "thing-k.log"]
    assert (root / "thing-k.log").read_text() == "why"
    cached("thing", "k", lambda work: (work / "result").touch())
    assert (root / "thing-k" / "result").exists()


def test_results_that_newer_ones_replaced_are_removed_when_old(root: Path) -> None:
    def age(path: Path, seconds: float) -> None:
        then = time.time() - seconds
        os.utime(path, (then, then))

    other = cached("thing-b", "0", lambda work: None)
    entries = [cached("thing", f"{i:x}", lambda work: None) for i in range(KEPT_RESULTS + 3)]
    for entry in [other, *entries]:
        age(entry, KEPT_S + 60)
    age(entries[1], KEPT_S - 60)
    abandoned = root / ".thing-killed"
    abandoned.mkdir()
    age(abandoned, ABANDONED_S + 60)
    assert cached("thing", "0", lambda work: None) == entries[0]  # used again: young again
    newest = cached("thing", "ff", lambda work: None)
    left = {path for path in root.iterdir() if path.name != "locks"}
    assert {newest, entries[0], entries[1], other} <= left
    assert len(left) == KEPT_RESULTS + 1
    assert abandoned not in left


def test_processes_that_want_the_same_result_build_it_once(root: Path, tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from plora.hw.build.cache import cached\n"
        "def build(work):\n"
        "    with open(sys.argv[1], 'a') as stream: stream.write('x')\n"
        "    time.sleep(0.3); (work / 'result').touch()\n"
        "assert (cached('thing', 'k', build) / 'result').exists()\n"
    )
    count = tmp_path / "count"
    processes = [subprocess.Popen([sys.executable, "-c", script, str(count)]) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert count.read_text() == "x"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PLORA_BUILD_DIR", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot build in .*file: .*; set PLORA_BUILD_DIR"):
        cached("thing", "k", lambda work: None)


def test_keys_separate_their_parts() -> None:
    assert content_key("ab", "c") != content_key("a", "bc")
    assert content_key("ab", "c") == content_key(b"ab", b"c")
    assert sources_key() == sources_key()


def test_the_checkout_builds_in_its_own_folder(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLORA_BUILD_DIR")
    assert build_root() == repository / "build" / "rtl"
