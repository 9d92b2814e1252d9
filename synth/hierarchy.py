"""Cuts emitted Verilog into blocks: what is mapped on its own, once, and counted as often as it is used.

Emitted Verilog has a module for every component. Modules with the same text (siblings in an array) are
one module here. A *block* is a component that an area table should name; everything below a block that
is not itself a block is flattened into it, and blocks below it are black boxes to it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass

from plora.hw.defs.config import PRESETS

SRAM_MODULE = "plora_sram"
"""Memories are never mapped: synth/sram.py says what they cost."""

BLOCK_PATTERNS: tuple[tuple[str, str], ...] = (
    (r"dot_unit_\w+", "pe.dot"),
    (r"pe_channel_\w+", "pe.operands"),
    (r"row_merge_\w+", "pe.merge"),
    (r"drain_\w+", "pe.drain"),
    (r"word_converter", "core.converter"),
    (r"word_expander_\w+", "core.expander"),
    (r"ndp_device\.core\.array", "pe.control"),
    (r"score_scale", "sfu.scale"),
    (r"exp2_fraction", "sfu.exp2"),
    (r"weight_round", "sfu.round"),
    (r"unit_maximum_\w+", "sfu.maximum"),
    (r"unit_sum_\w+", "sfu.sum"),
    (r"row_state_\w+", "sfu.rows"),
    (r"p_scale", "sfu.p_scale"),
    (r"p_scaler_\w+", "sfu.p_scaler"),
    (r"ndp_device\.core\.softmax\.sfu", "sfu.control"),
    (r"channel_reader_\w+", "core.reader"),
    (r"ndp_device\.core\.(\w+?)", r"core.\1"),
    (r"ndp_device\.core", "core.wiring"),
    (r"ndp_device\.(\w+?)", r"front.\1"),
    (r"ndp_device", "front.wiring"),
)
"""Modules that are blocks, and the names of the blocks; the first match counts. Numbers at the end of a
module's name (the index of a sibling, or what Amaranth adds to tell namesakes apart) do not.

A new component of the core or of the device needs no entry. Nor does a unit that is emitted once and
used several times (`plora.hw.build.platform.add_shared`): see `_repeated_units`."""

KEPT_TOGETHER = (r"sum_adder_\w+", r"operand_spreader_\w+", r"integer_value")
"""Repeated units that belong to what is around them: at the border of a block, shared terms and constants are
lost. The row merge with its adders as blocks was 7 % larger than in one piece, the feeder with its spreaders
4 %."""

_SIZES = re.compile(rf"(?:_(?:[0-9]+|{'|'.join(PRESETS)}))+$")
"""What a shared module's name says of the sizes it was emitted for."""

_MODULE = re.compile(r"^(?:\(\*[^\n]*\*\)\n)*module (\\\S+ |\w+).*?^endmodule$", re.MULTILINE | re.DOTALL)


def block_name(module: str) -> str | None:
    """Return the name of the block that the component ``module`` is, or ``None``."""
    for pattern, name in BLOCK_PATTERNS:
        match = re.fullmatch(pattern + r"(?:[$_]\d+)*", module)
        if match is not None:
            return match.expand(name)
    return None


@dataclass(frozen=True)
class VerilogModule:
    """A module: its text, and the instances in it with their modules, in the order of the text."""

    name: str
    text: str
    instances: tuple[tuple[str, str], ...]

    @property
    def children(self) -> Counter[str]:
        """How many instances of which modules there are."""
        return Counter(module for _, module in self.instances)


def _plain(name: str) -> str:
    return name.strip().removeprefix("\\")


def _renamed(line: str, names: dict[str, str]) -> str:
    """Return a line that begins an instance or a module, with its module's name exchanged."""
    match = re.match(r"(  |module )(\\\S+ |\w+)", line)
    if match is None or _plain(match[2]) not in names:
        return line
    return f"{match[1]}\\{names[_plain(match[2])]} {line[match.end() :]}"


def _instances(text: str, modules: Container[str]) -> tuple[tuple[str, str], ...]:
    """Return instance and module for every instance in the text of a module."""
    words = r"(\\\S+|\w+)"
    found = re.finditer(rf"^  {words} +(?:#\(.*?\n  \) +)?{words} +\(", text, re.MULTILINE | re.DOTALL)
    return tuple((_plain(match[2]), module) for match in found if (module := _plain(match[1])) in modules)


def split_modules(verilog: str) -> dict[str, VerilogModule]:
    """Return the modules of ``verilog``, as Yosys writes it, by name."""
    # A name that Yosys numbers through the whole file.
    verilog = re.sub(r"\$auto\$verilog_backend\.cc:\d+:dump_module\$\d+", "$unused", verilog)
    texts = {_plain(match[1]): match[0] for match in _MODULE.finditer(verilog)}
    return {name: VerilogModule(name, text, _instances(text, texts)) for name, text in texts.items()}


def _bottom_up(modules: dict[str, VerilogModule], top: str) -> list[str]:
    """Return ``top`` and the modules below it, children before parents."""
    order: dict[str, None] = {}

    def visit(name: str) -> None:
        if name not in order:
            for child in modules[name].children:
                visit(child)
            order[name] = None

    visit(top)
    return list(order)


_INVENTED = re.compile(r"\\port\$\d+\$\d+ ")
"""A port that Amaranth made for a signal used across a module's border; numbered through the whole design."""


def _port_names(text: str) -> dict[str, str]:
    """Return names for the invented ports of a module that depend on nothing outside it: their order."""
    header = text[: text.index(");")]
    return {old: f"\\port${number} " for number, old in enumerate(_INVENTED.findall(header))}


def _with_port_names(text: str, own: dict[str, str], children: dict[str, dict[str, str]]) -> str:
    """Return the text of a module with its own invented ports renamed, and those of the instances in it."""

    def renamed(part: str) -> str:
        return _INVENTED.sub(lambda found: own.get(found[0], found[0]), part)

    lines = []
    pins: dict[str, str] = {}
    for line in text.splitlines():
        connection = re.match(r"    \.(\\\S+ |\w+)(.*)", line)
        if connection is not None:
            lines.append(f"    .{pins.get(connection[1], connection[1])}{renamed(connection[2])}")
            continue
        instance = re.match(r"  (\\\S+|\w+) ", line)
        if instance is not None:
            pins = children.get(_plain(instance[1]), {})
        lines.append(renamed(line))
    return "\n".join(lines)


def merge_equal(modules: dict[str, VerilogModule], top: str) -> dict[str, VerilogModule]:
    """Return the modules below ``top`` with every set of equal ones replaced by its first."""
    kept: dict[str, str] = {}
    renames: dict[str, str] = {}
    ports: dict[str, dict[str, str]] = {}
    merged: dict[str, VerilogModule] = {}
    for name in _bottom_up(modules, top):
        module = modules[name]
        instances = tuple((instance, renames[child]) for instance, child in module.instances)
        ports[name] = _port_names(module.text)
        text = _with_port_names(module.text, ports[name], ports)
        lines = [_renamed(line, {name: name, **renames}) for line in text.splitlines()]
        anonymous = "\n".join(_renamed(line, {name: "@"}) for line in lines)
        renames[name] = kept.setdefault(anonymous, name)
        if renames[name] == name:
            merged[name] = VerilogModule(name, "\n".join(lines), instances)
    return merged


def _repeated_units(
    modules: dict[str, VerilogModule], order: list[str], names: dict[str, str | None], top: str
) -> dict[str, str]:
    """Return names for the units that are used more than once, have registers, no memory, and no entry in ``names``.

    Such a unit is called by its module, without sizes, in the part of the device (``pe``, ``core``, ...) that
    uses it.
    """
    places = module_places(modules, top)
    inside: dict[str, set[str]] = {}
    found: dict[str, str] = {}
    for name in order:
        inside[name] = {name}.union(*(inside[child] for child in modules[name].children))
        if (
            names[name] is None
            and "." not in name  # a component within a component, not emitted apart
            and len(places[name]) > 1
            and SRAM_MODULE not in inside[name]
            and any("@(posedge " in modules[each].text for each in inside[name])
            and not any(re.fullmatch(pattern, name) for pattern in KEPT_TOGETHER)
        ):
            part = next(label for user in _users(modules, order, name) if (label := names[user])).partition(".")[0]
            found[name] = f"{part}.{_SIZES.sub('', name)}"
    return found


def _users(modules: dict[str, VerilogModule], order: list[str], name: str) -> Iterator[str]:
    """Yield the modules that ``name`` lies in, the nearest first."""
    inside = {name}
    for user in order[order.index(name) + 1 :]:
        if any(child in inside for child in modules[user].children):
            inside.add(user)
            yield user


def black_box(module: VerilogModule) -> str:
    """Return ``module`` without contents, for whoever instantiates it."""
    if module.name == SRAM_MODULE:
        return f"(* blackbox *)\n{module.text}"
    lines = module.text.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("module "))
    # Long port lists go over several lines.
    end = next(index for index, line in enumerate(lines[start:], start) if line.endswith(");"))
    ports = [line for line in lines[end + 1 :] if re.match(r"  (input|output|inout) ", line)]
    return "\n".join(["(* blackbox *)", *lines[start : end + 1], *ports, "endmodule"])


def ports_of(verilog: str, module: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return the widths of the input and of the output ports of ``module`` in Verilog as Yosys writes it."""
    widths: tuple[dict[str, int], dict[str, int]] = ({}, {})
    declaration = r"^  (input|output) (?:\[(\d+):0\] )?(\\\S+|\w+) ?;"
    for match in re.finditer(declaration, split_modules(verilog)[module].text, re.MULTILINE):
        widths[match[1] == "output"][_plain(match[3])] = int(match[2] or 0) + 1
    return widths


def module_places(modules: dict[str, VerilogModule], top: str) -> dict[str, list[tuple[str, ...]]]:
    """Return where every module is used in ``top``: for each use the instance names from the top down."""
    order = _bottom_up(modules, top)
    places: dict[str, list[tuple[str, ...]]] = {name: [] for name in order}
    places[top].append(())
    for name in reversed(order):
        for instance, child in modules[name].instances:
            places[child] += [(*place, instance) for place in places[name]]
    return places


@dataclass(frozen=True)
class Block:
    """One block of a design.

    Attributes:
        name: in tables, such as ``pe.dot``. Blocks of one name that differ have a number after it.
        module: its Verilog module.
        verilog: the module, everything flattened into it, and black boxes of the blocks below it.
        children: blocks below it, by module, and how many of each.
        places: where it is in the design: for every instance the names from the top down.
    """

    name: str
    module: str
    verilog: str
    children: Counter[str]
    places: tuple[tuple[str, ...], ...]

    @property
    def count(self) -> int:
        """Instances in the whole design."""
        return len(self.places)


def cut_into_blocks(verilog: str, top: str, *, only: Container[str] | None = None) -> list[Block]:
    """Return the blocks of the design ``top``, children before parents.

    Args:
        verilog: emitted Verilog.
        top: its top module.
        only: of these modules make blocks, each with everything below it in one piece, and of no others.
    """
    modules = merge_equal(split_modules(verilog), top)
    order = _bottom_up(modules, top)
    names = {name: block_name(name) for name in order}
    names[top] = block_name(top) or top
    names[SRAM_MODULE] = None
    names |= _repeated_units(modules, order, names, top)
    if only is not None:
        names = {name: label for name, label in names.items() if name in only}
    places = module_places(modules, top)

    blocks: list[Block] = []
    seen = Counter[str]()
    for name in order:
        label = names.get(name)
        if label is None:
            continue
        inner: dict[str, int] = {}
        boxes = Counter[str]()

        def descend(module: str, times: int, inner: dict[str, int], boxes: Counter[str]) -> None:
            inner[module] = inner.get(module, 0) + times
            for child, count in modules[module].children.items():
                if child == SRAM_MODULE or names.get(child) is not None:
                    boxes[child] += times * count
                else:
                    descend(child, times * count, inner, boxes)

        descend(name, 1, inner, boxes)
        text = "\n".join([*(black_box(modules[box]) for box in sorted(boxes)), *(modules[m].text for m in inner)])
        seen[label] += 1
        blocks.append(
            Block(
                name=label if seen[label] == 1 else f"{label}.{seen[label]}",
                module=name,
                verilog=text + "\n",
                children=Counter({box: count for box, count in boxes.items() if box != SRAM_MODULE}),
                places=tuple(places[name]),
            )
        )
    return blocks
