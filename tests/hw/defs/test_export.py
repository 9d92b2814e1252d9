"""What is generated from the definitions: the C header, docs/interface.md and the JSON object."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plora.hw.build.toolchain import find_cxx
from plora.hw.defs import registers
from plora.hw.defs.descriptor import DESCRIPTOR_BYTES, FIELDS, Descriptor
from plora.hw.defs.export import CODES, as_dict, c_header, markdown
from plora.hw.defs.queue import (
    ANCHOR_FIELDS,
    COMPLETION_FIELDS,
    Anchor,
    Completion,
    exponents_of,
    softmax_scale_of,
    submission_line,
    valid_word,
)
from plora.hw.defs.status import MEANING, Status
from plora.sw.cli import main

# For each pass number and 64-byte line on standard input, one line: what the header makes of it.
PROGRAM = """
#include <stdio.h>
#include "plora_device.h"

int main(void)
{
    uint8_t in[4 + PLORA_LINE_BYTES], out[PLORA_LINE_BYTES];
    struct plora_descriptor d;
    struct plora_completion c;
    struct plora_anchor a;
    while (fread(in, sizeof in, 1, stdin) == 1) {
        uint32_t pass = (uint32_t)plora_bits_get(in, 0, 32);
        const uint8_t *line = in + 4;
        plora_descriptor_unpack(line, &d);
%(descriptor)s
        plora_submission_line(&d, (uint32_t)plora_bits_get(line, 8 * PLORA_SOFTMAX_SCALE_OFFSET, 32), pass, out);
        plora_submission_exponents(out, (int8_t)line[PLORA_EXPONENTS_OFFSET], (int8_t)line[PLORA_EXPONENTS_OFFSET + 1],
                                   (int8_t)line[PLORA_EXPONENTS_OFFSET + 2]);
        for (unsigned i = 0; i < PLORA_LINE_BYTES; i++)
            printf("%%02x", out[i]);
        printf(" %%d", plora_line_is_valid(line, pass));
        plora_completion_unpack(line, &c);
%(completion)s
        plora_anchor_unpack(line, &a);
%(anchor)s
        printf("\\n");
    }
    return 0;
}
"""


def show(names: list[str]) -> str:
    return "\n".join(f'        printf("%llu ", (unsigned long long){name});' for name in names)


Run = Callable[[bytes], list[list[str]]]


@pytest.fixture(scope="module", params=["c99", "c++17"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder: Path = tmp_path_factory.mktemp("header")
    (folder / "plora_device.h").write_text(c_header())
    source = folder / "main.c"
    scalars = [f"c.{f.name}" for f in COMPLETION_FIELDS if f.name != "descriptor"]
    source.write_text(
        PROGRAM
        % {
            "descriptor": show([f"d.{f.name}" for f in FIELDS]),
            "completion": '        printf(" ");\n' + show(scalars + [f"c.descriptor.{f.name}" for f in FIELDS]),
            "anchor": show([f"a.{f.name}" for f in ANCHOR_FIELDS if f.name != "anchor"])
            + '\n        printf("%ld ", (long)a.anchor);',
        }
    )
    if request.param == "c99":
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("no C compiler on PATH")
        command = [compiler, "-std=c99", "-Wconversion", "-pedantic"]
    else:
        command = [find_cxx()[0], "-std=c++17", "-x", "c++"]
    subprocess.run(
        [*command, "-O1", "-Wall", "-Wextra", "-Werror", str(source), "-o", str(folder / "main")], check=True
    )

    def run(data: bytes) -> list[list[str]]:
        done = subprocess.run([folder / "main"], input=data, stdout=subprocess.PIPE, check=True)
        return [line.split() for line in done.stdout.decode().splitlines()]

    return run


edges = st.sampled_from((bytes(64), b"\xff" * 64, b"\xa5" * 64)) | st.binary(min_size=64, max_size=64)


@given(st.lists(st.tuples(st.integers(0, (1 << 32) - 1), edges, st.booleans()), min_size=1, max_size=20))
def test_c_header_reads_and_writes_lines_as_python_does(program: Run, cases: list[tuple[int, bytes, bool]]) -> None:
    lines = [
        (number, line[:60] + valid_word(number).to_bytes(4, "little") if valid else line)
        for number, line, valid in cases
    ]
    outputs = program(b"".join(number.to_bytes(4, "little") + line for number, line in lines))
    assert len(outputs) == len(lines)
    for (number, line), output in zip(lines, outputs, strict=True):
        d, c = Descriptor.unpack(line), Completion.unpack(line)
        expected = [str(getattr(d, f.name)) for f in FIELDS]
        expected.append(submission_line(d, number, softmax_scale_of(line), exponents_of(line)).hex())
        expected.append(str(int(c.valid == valid_word(number))))
        expected += [str(getattr(c, f.name)) for f in COMPLETION_FIELDS if f.name != "descriptor"]
        expected += [str(getattr(c.descriptor, f.name)) for f in FIELDS]
        a = Anchor.unpack(line)
        expected += [str(getattr(a, f.name)) for f in ANCHOR_FIELDS if f.name != "anchor"] + [str(a.anchor)]
        assert output == expected, f"pass {number}, line {line.hex()}"


def test_c_header_states_every_register_status_and_code() -> None:
    header = c_header()
    for register in registers.GLOBAL:
        assert f"#define PLORA_REG_{register.name} {register.offset:#05x}u " in header
    for register in registers.QUEUE:
        assert f"#define PLORA_QREG_{register.name} {register.offset:#04x}u " in header
    for status in Status:
        assert f"PLORA_STATUS_{status.name} = {status.value}," in header
    for name, codes in CODES.items():
        for code in codes:
            assert f"PLORA_{name.upper()}_{code.name} = {code.value}," in header


def test_interface_document_is_what_the_definitions_say(repository: Path) -> None:
    assert (repository / "docs" / "interface.md").read_text() == markdown(), (
        "docs/interface.md is not current: plora defs --format markdown > docs/interface.md"
    )


def test_every_status_has_a_meaning_and_completion_fields_do_not_overlap() -> None:
    assert set(MEANING) == set(Status)
    end = 0
    for f in COMPLETION_FIELDS:
        assert f.offset >= end
        end = f.offset + f.size
    assert end == 64
    assert next(f.size for f in COMPLETION_FIELDS if f.name == "descriptor") == DESCRIPTOR_BYTES


def test_registers_are_aligned_distinct_and_inside_their_block() -> None:
    for block, size in ((registers.GLOBAL, registers.QUEUE_BASE), (registers.QUEUE, registers.QUEUE_STRIDE)):
        offsets = [r.offset for r in block]
        assert offsets == sorted(set(offsets))
        assert all(o % 4 == 0 and o + 4 <= size for o in offsets)
    assert registers.queue_offset(63, registers.QUEUE[-1].name) + 4 <= 1 << registers.MMIO_BITS


@pytest.mark.parametrize(
    ("flags", "name", "expected"),
    [
        ([], "interface.md", markdown),
        (["--format", "c-header"], "plora_device.h", c_header),
        (["--format", "json"], "interface.json", lambda: json.dumps(as_dict(), indent=2) + "\n"),
    ],
)
def test_verb_prints_and_writes_each_format(
    flags: list[str],
    name: str,
    expected: Callable[[], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["defs", *flags, "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == expected()
    assert (tmp_path / name).read_text() == expected()


def test_verb_gives_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["defs", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["descriptor"]["bits"] == 204
    assert [s["name"] for s in answer["status"]] == [s.name for s in Status]
