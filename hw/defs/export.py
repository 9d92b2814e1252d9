"""The shared definitions in other languages: a C header, Markdown tables and a JSON object.

Everything is made from the definitions of this package when asked for; nothing is stated again here.
`docs/interface.md` is the output of `markdown`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any

from plora.hw.defs import descriptor, ports, queue, registers
from plora.hw.defs.config import PRESETS, NdpConfig
from plora.hw.defs.descriptor import DESCRIPTOR_BITS, DESCRIPTOR_BYTES, FIELDS, DType, Keep, Op, Source, Type
from plora.hw.defs.queue import ANCHOR_FIELDS, COMPLETION_FIELDS, LINE_BYTES, SUBMISSION_FIELDS, LineField
from plora.hw.defs.status import CHECK_ORDER, MEANING, Status

CODES: dict[str, type[IntEnum]] = {"type": Type, "op": Op, "dtype": DType, "source": Source, "keep": Keep}
"""Descriptor fields whose values have names."""

_QUEUE_CONSTANTS = {
    "LINE_BYTES": LINE_BYTES,
    "DESCRIPTOR_BITS": DESCRIPTOR_BITS,
    "DESCRIPTOR_BYTES": DESCRIPTOR_BYTES,
    "MAX_OPERAND_BYTES": descriptor.MAX_OPERAND_BYTES,
    "SOFTMAX_SCALE_OFFSET": queue.SOFTMAX_SCALE_OFFSET,
    "EXPONENTS_OFFSET": queue.EXPONENTS_OFFSET,
    "MIN_OPERAND_EXPONENT": queue.MIN_OPERAND_EXPONENT,
    "MAX_OPERAND_EXPONENT": queue.MAX_OPERAND_EXPONENT,
    "VALID_OFFSET": queue.VALID_OFFSET,
    "VALID_TAG": queue.VALID_TAG,
    "PASS_BITS": queue.PASS_BITS,
    "MIN_DEPTH": queue.MIN_DEPTH,
    "MAX_DEPTH": queue.MAX_DEPTH,
    "MIN_SLOT_LOG2": queue.MIN_SLOT_LOG2,
    "MAX_SLOT_LOG2": queue.MAX_SLOT_LOG2,
    "RESULT_OFFSET": queue.RESULT_OFFSET,
    "NUMERIC_NAN": queue.NUMERIC_NAN,
    "NUMERIC_OVERFLOW": queue.NUMERIC_OVERFLOW,
    "ANCHOR_NAN": queue.ANCHOR_NAN,
    "SUM_FRACTION_BITS": queue.SUM_FRACTION_BITS,
}

_REGISTER_CONSTANTS = {
    "ID_VALUE": registers.ID_VALUE,
    "INTERFACE_VERSION": registers.INTERFACE_VERSION,
    "QUEUE_BASE": registers.QUEUE_BASE,
    "QUEUE_STRIDE": registers.QUEUE_STRIDE,
    "VECTOR_BASE": registers.VECTOR_BASE,
    "VECTOR_STRIDE": registers.VECTOR_STRIDE,
    "PENDING_BASE": registers.PENDING_BASE,
    "RESET_CHAIN_TIMEOUT": registers.RESET_CHAIN_TIMEOUT,
    "RESET_CHAIN_LIMIT": registers.RESET_CHAIN_LIMIT,
    "RESET_POLL_INTERVAL": registers.RESET_POLL_INTERVAL,
    "RESET_WATCHDOG": registers.RESET_WATCHDOG,
    "RESET_SHARE": registers.RESET_SHARE,
}


def _c_type(bits: int) -> str:
    return next(f"uint{size}_t" for size in (8, 16, 32, 64) if bits <= size)


def _c_defines(constants: dict[str, int]) -> list[str]:
    return [f"#define PLORA_{name} {_c_number(value)}" for name, value in constants.items()]


def _c_number(value: int) -> str:
    return f"{value:#x}u" if value > 4096 else f"{value}u"


def _c_enum(name: str, members: Iterable[IntEnum], docs: dict[Any, str]) -> list[str]:
    lines = [f"enum plora_{name} {{"]
    for member in members:
        comment = f" /* {docs[member]} */" if member in docs else ""
        lines.append(f"    PLORA_{name.upper()}_{member.name} = {member.value},{comment}")
    return [*lines, "};"]


def _c_struct(name: str, fields: Iterable[tuple[str, str, str]]) -> list[str]:
    return [f"struct {name} {{", *(f"    {kind} {field}; /* {doc} */" for kind, field, doc in fields), "};"]


_C_BITS = """\
/* Bits [offset, offset + width) of a little-endian bit string; width is 1 ... 64. */
static inline uint64_t plora_bits_get(const uint8_t *bytes, unsigned offset, unsigned width)
{
    uint64_t value = 0;
    for (unsigned i = 0; i < width; i++) {
        unsigned bit = offset + i;
        value |= (uint64_t)(bytes[bit / 8] >> (bit % 8) & 1u) << i;
    }
    return value;
}

static inline void plora_bits_set(uint8_t *bytes, unsigned offset, unsigned width, uint64_t value)
{
    for (unsigned i = 0; i < width; i++) {
        unsigned bit = offset + i;
        uint8_t mask = (uint8_t)(1u << (bit % 8));
        if (value >> i & 1u)
            bytes[bit / 8] |= mask;
        else
            bytes[bit / 8] &= (uint8_t)~mask;
    }
}"""

_C_LINES = """\
static inline uint32_t plora_valid_word(uint32_t pass)
{
    return (uint32_t)PLORA_VALID_TAG << PLORA_PASS_BITS | (pass & ((1u << PLORA_PASS_BITS) - 1u));
}

/*
 * Line 0 of a submission slot, PLORA_LINE_BYTES. Store it in one piece, after the operand has reached memory.
 * softmax_scale: the bits of an FP32 value whose low 7 bits the device ignores; 0 for other operations.
 */
static inline void plora_submission_line(const struct plora_descriptor *d, uint32_t softmax_scale, uint32_t pass,
                                         uint8_t *line)
{
    memset(line, 0, PLORA_LINE_BYTES);
    plora_descriptor_pack(d, line);
    plora_bits_set(line, 8 * PLORA_SOFTMAX_SCALE_OFFSET, 32, softmax_scale);
    plora_bits_set(line, 8 * PLORA_VALID_OFFSET, 32, plora_valid_word(pass));
}

/* Puts the exponents of a BF16 descriptor into the line, before it is stored. */
static inline void plora_submission_exponents(uint8_t *line, int8_t operand, int8_t device, int8_t kept)
{
    line[PLORA_EXPONENTS_OFFSET] = (uint8_t)operand;
    line[PLORA_EXPONENTS_OFFSET + 1] = (uint8_t)device;
    line[PLORA_EXPONENTS_OFFSET + 2] = (uint8_t)kept;
}

/* True if the line is complete for this pass of the ring. */
static inline int plora_line_is_valid(const uint8_t *line, uint32_t pass)
{
    return plora_bits_get(line, 8 * PLORA_VALID_OFFSET, 32) == plora_valid_word(pass);
}"""


def _c_descriptor() -> list[str]:
    lines = ["/* Descriptor fields: bit offset and width. */"]
    for f in FIELDS:
        lines.append(f"#define PLORA_{f.name.upper()}_OFFSET {f.offset}u")
        lines.append(f"#define PLORA_{f.name.upper()}_WIDTH {f.width}u")
    lines += ["", *_c_struct("plora_descriptor", ((_c_type(f.width), f.name, f.doc) for f in FIELDS)), ""]

    def bits(f: descriptor.Field) -> str:
        return f"PLORA_{f.name.upper()}_OFFSET, PLORA_{f.name.upper()}_WIDTH"

    lines += [
        "/* PLORA_DESCRIPTOR_BYTES bytes. Values too wide for their field are cut to it. */",
        "static inline void plora_descriptor_pack(const struct plora_descriptor *d, uint8_t *bytes)",
        "{",
        "    memset(bytes, 0, PLORA_DESCRIPTOR_BYTES);",
        *(f"    plora_bits_set(bytes, {bits(f)}, d->{f.name});" for f in FIELDS),
        "}",
        "",
        "static inline void plora_descriptor_unpack(const uint8_t *bytes, struct plora_descriptor *d)",
        "{",
        *(f"    d->{f.name} = ({_c_type(f.width)})plora_bits_get(bytes, {bits(f)});" for f in FIELDS),
        "}",
    ]
    return lines


def _c_completion() -> list[str]:
    def kind(f: LineField) -> str:
        return "struct plora_descriptor" if f.name == "descriptor" else _c_type(8 * f.size)

    lines = _c_struct("plora_completion", ((kind(f), f.name, f.doc) for f in COMPLETION_FIELDS))
    lines += [
        "",
        "static inline void plora_completion_unpack(const uint8_t *line, struct plora_completion *c)",
        "{",
    ]
    for f in COMPLETION_FIELDS:
        if f.name == "descriptor":
            lines.append(f"    plora_descriptor_unpack(line + {f.offset}, &c->descriptor);")
        else:
            lines.append(f"    c->{f.name} = ({kind(f)})plora_bits_get(line, {8 * f.offset}, {8 * f.size});")
    return [*lines, "}"]


def _c_anchor() -> list[str]:
    def kind(f: LineField) -> str:
        return "int32_t" if f.name == "anchor" else _c_type(8 * f.size)

    return [
        *_c_struct("plora_anchor", ((kind(f), f.name, f.doc) for f in ANCHOR_FIELDS)),
        "",
        "/* The last word of a result row of a transposed descriptor. */",
        "static inline void plora_anchor_unpack(const uint8_t *word, struct plora_anchor *a)",
        "{",
        *(f"    a->{f.name} = ({kind(f)})plora_bits_get(word, {8 * f.offset}, {8 * f.size});" for f in ANCHOR_FIELDS),
        "}",
    ]


def c_header() -> str:
    """Return a C99 header (also C++) with constants, structures, and functions that pack and unpack."""
    lines = [
        "/* The interface of the PLoRA device. Generated by `plora defs --format c-header`; do not edit. */",
        "#ifndef PLORA_DEVICE_H",
        "#define PLORA_DEVICE_H",
        "",
        "#include <stdint.h>",
        "#include <string.h>",
        "",
        *_c_defines(_QUEUE_CONSTANTS),
        "",
        *_c_enum("status", Status, dict(MEANING)),
    ]
    for name, codes in CODES.items():
        lines += ["", *_c_enum(name, codes, {})]
    lines += ["", "/* Registers: byte offsets in MMIO space, 32 bits each. */", *_c_defines(_REGISTER_CONSTANTS)]
    lines += [f"#define PLORA_REG_{r.name} {r.offset:#05x}u /* {r.access}: {r.doc} */" for r in registers.GLOBAL]
    lines += ["", "/* Registers of one queue, from the start of its block. */"]
    lines += [f"#define PLORA_QREG_{r.name} {r.offset:#04x}u /* {r.access}: {r.doc} */" for r in registers.QUEUE]
    lines += ["", "/* Registers of one MSI-X vector, from the start of its entry. */"]
    lines += [f"#define PLORA_VREG_{r.name} {r.offset:#03x}u /* {r.access}: {r.doc} */" for r in registers.VECTOR]
    lines += [
        "#define PLORA_VECTOR(v, reg) (PLORA_VECTOR_BASE + (v) * PLORA_VECTOR_STRIDE + PLORA_VREG_##reg)",
        "#define PLORA_QUEUE(q, reg) (PLORA_QUEUE_BASE + (q) * PLORA_QUEUE_STRIDE + PLORA_QREG_##reg)",
        "",
        _C_BITS,
        "",
        *_c_descriptor(),
        "",
        _C_LINES,
        "",
        *_c_completion(),
        "",
        *_c_anchor(),
        "",
        "#endif",
    ]
    return "\n".join(lines) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    def line(cells: Iterable[object]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"

    return [line(head), line("-" * 3 for _ in head), *(line(row) for row in rows)]


def _line_table(fields: Iterable[LineField]) -> list[str]:
    def place(f: LineField) -> str:
        return f"{f.offset} ... {f.offset + f.size - 1}" if f.size > 1 else f"{f.offset}"

    return _table(("bytes", "field", "meaning"), ((place(f), f"`{f.name}`", f.doc) for f in fields))


def _codes(codes: type[IntEnum]) -> str:
    return ", ".join(f"{code.value} {code.name}" for code in codes)


def _module_text(doc: str | None) -> str:
    """Return what a module's docstring says after its first line."""
    assert doc is not None
    return doc.split("\n", 1)[1].strip().replace("::\n", ":\n")


def _sizes(config: NdpConfig) -> dict[str, int | str]:
    return {
        f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in ("name", "accumulator")
    }


def markdown() -> str:
    """Return the interface as a Markdown document of tables."""
    sizes = {name: _sizes(config) for name, config in PRESETS.items()}
    tiny_ports = [p for p in ports.device_ports(PRESETS["tiny"]) if not p.name.startswith(ports.memory_bus(1))]
    return "\n".join(
        [
            "# Interface of the device",
            "",
            "Generated by `plora defs --format markdown`; do not edit. The source is `hw/defs/`.",
            "",
            "## Descriptor",
            "",
            f"{DESCRIPTOR_BITS} bits, little-endian, in the first {DESCRIPTOR_BYTES} bytes of a submission slot.",
            "",
            *_table(
                ("bits", "field", "width", "meaning", "values"),
                (
                    (
                        f"{f.offset + f.width - 1}:{f.offset}" if f.width > 1 else f.offset,
                        f"`{f.name}`",
                        f.width,
                        f.doc,
                        _codes(CODES[f.name]) if f.name in CODES else "",
                    )
                    for f in FIELDS
                ),
            ),
            "",
            "## Queues",
            "",
            _module_text(queue.__doc__),
            "",
            f"The valid word is {queue.VALID_TAG:#x} in its top byte and the pass number, modulo"
            f" 2^{queue.PASS_BITS}, below.",
            "",
            "### Submission line",
            "",
            *_line_table(SUBMISSION_FIELDS),
            "",
            "### Completion line",
            "",
            *_line_table(COMPLETION_FIELDS),
            "",
            "### Anchor of a result row",
            "",
            *_line_table(ANCHOR_FIELDS),
            "",
            "### Status codes",
            "",
            "A descriptor with several faults gets the first in the order of the checks: "
            + ", ".join(f"`{status.name}`" for status in CHECK_ORDER)
            + ".",
            "",
            *_table(("code", "name", "meaning"), ((s.value, f"`{s.name}`", MEANING[s]) for s in Status)),
            "",
            "## Registers",
            "",
            _module_text(registers.__doc__),
            "",
            *_table(
                ("offset", "register", "access", "meaning"),
                ((f"{r.offset:#05x}", f"`{r.name}`", r.access, r.doc) for r in registers.GLOBAL),
            ),
            "",
            "After reset "
            + ", ".join(
                f"`{name.removeprefix('RESET_')}` is {value}"
                for name, value in _REGISTER_CONSTANTS.items()
                if name.startswith("RESET_")
            )
            + ".",
            "",
            f"Of queue q, from {registers.QUEUE_BASE:#x} + q * {registers.QUEUE_STRIDE:#x}:",
            "",
            *_table(
                ("offset", "register", "access", "meaning"),
                ((f"{r.offset:#04x}", f"`{r.name}`", r.access, r.doc) for r in registers.QUEUE),
            ),
            "",
            f"Of MSI-X vector v, from {registers.VECTOR_BASE:#x} + v * {registers.VECTOR_STRIDE:#x}; pending bits from"
            f" {registers.PENDING_BASE:#x}, 32 a register:",
            "",
            *_table(
                ("offset", "register", "access", "meaning"),
                ((f"{r.offset:#03x}", f"`{r.name}`", r.access, r.doc) for r in registers.VECTOR),
            ),
            "",
            "## Ports",
            "",
            f"One bus `{ports.memory_bus(0)}` ... for each memory channel.",
            "",
            *_table(
                ("port", "bits", "direction"),
                ((f"`{p.name}`", p.width, "out" if p.output else "in") for p in tiny_ports),
            ),
            "",
            "## Configurations",
            "",
            *_table(
                ("size", *(f"`{name}`" for name in sizes)),
                ((f"`{field}`", *(sizes[name][field] for name in sizes)) for field in sizes["tiny"]),
            ),
            "",
        ]
    )


def as_dict() -> dict[str, Any]:
    """Return the definitions as plain numbers, strings, lists and dictionaries, fit for JSON."""
    return {
        "descriptor": {
            "bits": DESCRIPTOR_BITS,
            "fields": [f._asdict() for f in FIELDS],
            "codes": {name: {code.name: code.value for code in codes} for name, codes in CODES.items()},
        },
        "queue": {name.lower(): value for name, value in _QUEUE_CONSTANTS.items()}
        | {
            "submission": [f._asdict() for f in SUBMISSION_FIELDS],
            "completion": [f._asdict() for f in COMPLETION_FIELDS],
            "anchor": [f._asdict() for f in ANCHOR_FIELDS],
        },
        "status": [{"code": s.value, "name": s.name, "meaning": MEANING[s]} for s in Status],
        "registers": {name.lower(): value for name, value in _REGISTER_CONSTANTS.items()}
        | {
            "global": [r._asdict() | {"access": str(r.access)} for r in registers.GLOBAL],
            "queue": [r._asdict() | {"access": str(r.access)} for r in registers.QUEUE],
            "vector": [r._asdict() | {"access": str(r.access)} for r in registers.VECTOR],
        },
        "configurations": {name: _sizes(config) for name, config in PRESETS.items()},
    }
