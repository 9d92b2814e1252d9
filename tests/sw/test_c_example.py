"""The example in C is compiled and run against the functional device in another process."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from plora.hw.build.toolchain import find_cxx
from plora.hw.defs.config import preset
from plora.hw.defs.errors import UserError
from plora.hw.defs.export import c_header
from plora.hw.defs.registers import ID_VALUE
from plora.sim.functional.shared import END, MEMORY_OFFSET, READ, SharedMemory, serve_file
from plora.sw.cli import main

TINY = preset("tiny")


def compiler() -> list[str]:
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return [path, "-std=c99"]
    return [str(find_cxx()[0]), "-fpermissive", "-w"]


@pytest.fixture(scope="module")
def example(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("example")
    (folder / "plora_device.h").write_text(c_header())
    source = repository / "docs" / "examples" / "one_product.c"
    program = folder / "one_product"
    warnings = ["-Wall", "-Wextra", "-Werror"] if "-w" not in compiler() else []
    command = [*compiler(), *warnings, "-O2", f"-I{folder}", "-o", str(program), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


@pytest.mark.parametrize("name", ["tiny", "small", "full"])
def test_the_example_gets_its_result_from_a_device_in_another_process(example: Path, name: str, tmp_path: Path) -> None:
    file = tmp_path / "device"
    command = [sys.executable, "-m", "plora.sw.cli", "device", "--file", str(file), "--preset", name, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as device:
        assert device.stderr is not None
        assert "ready" in device.stderr.readline()
        done = subprocess.run([str(example), str(file)], capture_output=True, text=True, timeout=60)
        out, err = device.communicate(timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 8
    assert device.returncode == 0, err
    assert '"register_accesses"' in out
    assert not file.exists()


def test_the_example_says_what_it_needs(example: Path) -> None:
    done = subprocess.run([str(example)], capture_output=True, text=True)
    assert done.returncode == 1 and "plora device --file" in done.stderr


def test_a_host_that_never_comes_and_a_file_that_is_there_are_one_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "device"
    assert main(["device", "--file", str(file), "--idle-seconds", "0.05"]) == 2
    assert "no host accessed a register for 0.05 s" in capsys.readouterr().err
    assert not file.exists()
    file.write_text("mine")
    assert main(["device", "--file", str(file)]) == 2
    assert "name a file that does not exist" in capsys.readouterr().err
    assert file.read_text() == "mine"
    for flags in (["--memory-bytes", "-1"], ["--memory-bytes", "100"], ["--idle-seconds", "nan"], ["--preset", "big"]):
        assert main(["device", "--file", str(tmp_path / "other"), *flags]) == 2, flags
        assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("end", ["killed", "cut short", "replaced"])
def test_a_device_that_ends_otherwise_takes_its_own_file_along_and_no_other(end: str, tmp_path: Path) -> None:
    file = tmp_path / "device"
    command = [sys.executable, "-m", "plora.sw.cli", "device", "--file", str(file), "--idle-seconds", "30"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as device:
        assert device.stderr is not None
        assert "ready" in device.stderr.readline()
        if end == "cut short":
            os.truncate(file, 0)
        else:
            if end == "replaced":
                file.unlink()
                file.write_text("another's")
            device.terminate()
        err = device.communicate(timeout=60)[1]
    assert device.returncode == (2 if end == "cut short" else 143), err
    assert ("the device's file was cut short" in err) == (end == "cut short")
    assert file.exists() == (end == "replaced")


def test_registers_are_read_through_the_mailbox(tmp_path: Path) -> None:
    file = tmp_path / "device"
    server = threading.Thread(target=serve_file, args=(file, TINY, 1 << 20), kwargs={"idle_seconds": 20.0})
    server.start()
    while not file.exists() or file.stat().st_size < MEMORY_OFFSET:
        time.sleep(0.001)
    handle = os.open(file, os.O_RDWR)
    for number, kind in ((1, READ), (2, END)):
        os.pwrite(handle, struct.pack("<III", kind, 0, 0), 4)
        os.pwrite(handle, struct.pack("<I", number), 0)
        while struct.unpack("<I", os.pread(handle, 4, 16))[0] != number:
            time.sleep(0.001)
        if kind == READ:
            assert struct.unpack("<I", os.pread(handle, 4, 12))[0] == ID_VALUE
    os.close(handle)
    server.join(20)
    assert not server.is_alive()


def test_shared_memory_acts_as_sparse_memory_does() -> None:
    memory = SharedMemory(memoryview(bytearray(256)))
    memory.write(60, bytes(range(70)))
    assert memory.read(60, 70) == bytes(range(70)) and memory.read(0, 60) == bytes(60)
    memory.write(3, b"\x07")
    assert memory.read(3, 1) == b"\x07"
    with pytest.raises(Exception, match="memory has 256 bytes"):
        memory.read(250, 7)


def test_memory_of_no_proper_size_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        serve_file(tmp_path / "device", TINY, 100, idle_seconds=1)
    assert not (tmp_path / "device").exists()
