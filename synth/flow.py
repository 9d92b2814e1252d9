"""The flow: from a device configuration to area and timing of every block.

Blocks are mapped once each, children before parents, and multiplied by how often they occur; paths
between them are found with the blocks as cells of their parents (`plora.synth.timing`).
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from plora.hw.build.verilog import TOP, device_verilog
from plora.hw.defs.config import NdpConfig
from plora.hw.defs.errors import UserError
from plora.synth.hierarchy import SRAM_MODULE, Block, cut_into_blocks
from plora.synth.liberty import Cell, TimingArc
from plora.synth.mapping import AUTO, Recipe, Target, map_module, recipes
from plora.synth.netlist import Netlist
from plora.synth.sizing import size_drivers
from plora.synth.sram import SETUP_NS, SramMacro
from plora.synth.timing import PathClass, TimingAnalysis, TimingPath, bit_pins, block_cell, constant

CLOSE_ENOUGH = 0.01
"""A block that misses the clock by this much is not mapped again: other recipes cost more area than that."""

SIZED_FOR = 0.95
"""Share of the clock period that gates are sized for: the rest is for a clock that is not ideal, and for
registers outside the block that are slower than the mapper takes them to be."""


@dataclass(frozen=True)
class BlockResult:
    """A block after mapping.

    Attributes:
        name: as in `plora.synth.hierarchy`.
        module: its Verilog module.
        count: instances in the design.
        ge: area of one, in gate equivalents, without the blocks in it and without SRAM.
        flip_flops: in one.
        cells: library cells in one, by name.
        srams: memories in one.
        paths: longest paths, blocks below included.
        misses: register to register paths over the clock period, see `TimingAnalysis.misses`.
        recipe: what it was mapped by.
    """

    name: str
    module: str
    count: int
    ge: float
    flip_flops: int
    cells: Counter[str]
    srams: Counter[SramMacro]
    paths: dict[PathClass, TimingPath]
    misses: tuple[TimingPath, ...]
    recipe: str

    @property
    def total_ge(self) -> float:
        """Area of all instances, in gate equivalents."""
        return self.ge * self.count

    @property
    def period_ps(self) -> float:
        """Shortest clock period for paths between registers in the block and in those below it."""
        path = self.paths.get(PathClass.REGISTER)
        return path.length_ps if path is not None else 0.0


@dataclass(frozen=True)
class DesignResult:
    """A design after mapping: its blocks, children before parents, the last one being the top, and their netlists."""

    config: NdpConfig
    blocks: tuple[BlockResult, ...]
    netlists: dict[str, Netlist]

    def block(self, name: str) -> BlockResult:
        """Return the block called ``name``.

        Raises:
            UserError: there is none; the message lists those there are.
        """
        for block in self.blocks:
            if block.name == name:
                return block
        raise UserError(
            f"no block {name!r} in the {self.config.name} design; it has {', '.join(b.name for b in self.blocks)}"
        )

    def total_ge(self, prefix: str = "") -> float:
        """Return the area of all instances of the blocks whose names begin with ``prefix``."""
        return sum(block.total_ge for block in self.blocks if block.name.startswith(prefix))

    def srams(self) -> Counter[SramMacro]:
        """Return all memories of the design."""
        total = Counter[SramMacro]()
        for block in self.blocks:
            for macro, count in block.srams.items():
                total[macro] += count * block.count
        return total

    def ge_per_multiply_add(self) -> float:
        """Return the area of the PE array (blocks ``pe.*``) over its multiply-adds."""
        return self.total_ge("pe.") / self.config.multiply_adds


def sram_of(parameters: dict[str, str]) -> SramMacro:
    """Return the memory that an instance of ``plora_sram`` with these parameters (binary text) is."""
    return SramMacro(width=int(parameters["WIDTH"], 2), depth=int(parameters["DEPTH"], 2))


def sram_cell(name: str, ports: dict[str, int], macro: SramMacro, pin_ff: float) -> Cell:
    """Return ``macro`` as a cell for timing: access time from its clock, setup at its inputs."""
    access, setup = constant(1000 * macro.access_ns()), constant(1000 * SETUP_NS)
    transition = (constant(10.0), constant(10.0))
    outputs = [pin for pin in bit_pins("read_data", ports["read_data"])]
    inputs = [pin for port, width in ports.items() if port not in ("clk", "read_data") for pin in bit_pins(port, width)]
    return Cell(
        name=name,
        area=0.0,
        input_ff=dict.fromkeys(inputs, pin_ff),
        arcs={pin: (TimingArc("clk", "non_unate", (access, access), transition),) for pin in outputs},
        functions={},
        clock="clk",
        setup=dict.fromkeys(inputs, (setup, setup)),
        leakage_nw=0.0,
    )


class Flow:
    """Maps the blocks of one design, in order, keeping what parents need of their children.

    Args:
        target: library to map to.
        recipes: how; the first that meets the clock is taken, or else the least product of area and time.
        period_ps: clock period.
        wire_ff: wire load per pin in timing.
        jobs: Yosys processes at a time.
        tell: called with a line of text when a block begins.
    """

    def __init__(
        self,
        target: Target,
        recipes: Sequence[Recipe],
        *,
        period_ps: float,
        wire_ff: float = 0.0,
        jobs: int = 1,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.target = target
        self.recipes = recipes
        self.period_ps = period_ps
        self.wire_ff = wire_ff
        self.jobs = jobs
        self.tell = tell
        self.netlists: dict[str, Netlist] = {}
        self._cells: dict[str, Cell] = dict(target.library.cells)

    def run(self, blocks: Iterable[Block]) -> list[BlockResult]:
        """Return the results of ``blocks``, which must come children before parents.

        `jobs` of them are under way at a time. They begin in order, so that those that one waits for, its children,
        have begun before it, and some block never waits.
        """
        blocks = list(blocks)
        done: dict[str, Future[tuple[BlockResult, Netlist]]] = {}
        with ThreadPoolExecutor(self.jobs) as pool:
            for block in blocks:
                children = [done[child] for child in block.children if child in done]
                done[block.module] = pool.submit(self._block, block, children)
            try:
                for block in blocks:
                    self.netlists[block.name] = done[block.module].result()[1]
                return [done[block.module].result()[0] for block in blocks]
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _mapped(self, block: Block, recipe: Recipe) -> Netlist:
        return map_module(block.verilog, block.module, self.target, recipe, SIZED_FOR * self.period_ps)

    def _block(self, block: Block, children: Sequence[Future[Any]]) -> tuple[BlockResult, Netlist]:
        """Map a block; its timing needs that of its ``children``."""
        self.tell(f"{block.name} x {block.count}")
        best: tuple[float, Recipe, TimingAnalysis, Counter[SramMacro]] | None = None
        for recipe in self.recipes:
            mapped = self._mapped(block, recipe)
            for child in children:
                child.result()
            netlist, srams = self._with_srams(mapped)
            netlist = size_drivers(netlist, self._cells, self.target.library, self.wire_ff)
            analysis = TimingAnalysis(netlist, self._cells, self.target.library, self.wire_ff)
            stretch = self._stretch(analysis)
            cost = netlist.area_ge(self.target.library) * max(1.0, stretch)
            if best is None or cost < best[0]:
                best = (cost, recipe, analysis, srams)
            if stretch <= 1 + CLOSE_ENOUGH:
                break
        assert best is not None, "no recipe"
        _, recipe, analysis, srams = best
        netlist = analysis.netlist
        self._cells[block.module] = block_cell(analysis, 0.0)
        library = self.target.library
        result = BlockResult(
            name=block.name,
            module=block.module,
            count=block.count,
            ge=netlist.area_ge(library),
            flip_flops=netlist.flip_flops(library),
            cells=Counter({kind: n for kind, n in netlist.counts().items() if kind in library.cells}),
            srams=srams,
            paths=analysis.paths(),
            misses=tuple(analysis.misses(self.period_ps, library.cells)),
            recipe=recipe.name,
        )
        return result, netlist

    def _with_srams(self, netlist: Netlist) -> tuple[Netlist, Counter[SramMacro]]:
        """Return ``netlist`` with a kind of cell for every size of memory in it, and those memories."""
        srams = Counter[SramMacro]()
        instances = []
        pin_ff = 2 * next(iter(self.target.library.smallest_inverter().input_ff.values()))
        for instance in netlist.instances:
            if instance.kind == SRAM_MODULE:
                macro = sram_of(instance.parameters)
                srams[macro] += 1
                kind = f"{SRAM_MODULE}_{macro.width}x{macro.depth}_{len(instance.pins)}"
                if kind not in self._cells:
                    ports = Counter(pin.partition("[")[0] for pin in instance.pins)
                    self._cells[kind] = sram_cell(kind, dict(ports), macro, pin_ff)
                instance = dataclasses.replace(instance, kind=kind)
            instances.append(instance)
        return dataclasses.replace(netlist, instances=instances), srams

    def _stretch(self, analysis: TimingAnalysis) -> float:
        """Return the worst path over the time it may take, with a register's share at either port."""
        register = self.target.register_ps
        room = {
            PathClass.REGISTER: self.period_ps,
            PathClass.INPUT: self.period_ps - register,
            PathClass.OUTPUT: self.period_ps - register,
            PathClass.THROUGH: self.period_ps - 2 * register,
        }
        return max((path.length_ps / max(room[kind], register) for kind, path in analysis.paths().items()), default=0.0)


@functools.lru_cache(maxsize=4)
def design_blocks(config: NdpConfig) -> tuple[Block, ...]:
    """Return the blocks of the device at the sizes of ``config``, children before parents."""
    return tuple(cut_into_blocks(device_verilog(config), TOP))


def flat_blocks(config: NdpConfig, blocks: Iterable[Block]) -> list[Block]:
    """Return ``blocks`` of the device at the sizes of ``config`` again, each with all that is in it in one piece."""
    return cut_into_blocks(device_verilog(config), TOP, only={block.module for block in blocks})


def matching_names(names: Sequence[str], name: str) -> list[str]:
    """Return those of the blocks called ``names`` that ``name`` stands for.

    That is the block of exactly this name; or else all of a part of the device (``pe``); or those called so
    in whatever part (``feeder`` for ``core.feeder``).

    Raises:
        UserError: there is no such block; the message lists those there are.
    """
    for chosen in (
        [each for each in names if each == name],
        [each for each in names if each.startswith(f"{name}.")],
        [each for each in names if each.partition(".")[2] == name],
    ):
        if chosen:
            return chosen
    raise UserError(f"no unit {name!r}; choose of {', '.join(names)}")


def named_blocks(blocks: Sequence[Block], name: str) -> list[Block]:
    """Return the blocks that ``name`` stands for, see `matching_names`.

    Raises:
        UserError: there is no such block; the message lists those there are.
    """
    by_name = {block.name: block for block in blocks}
    return [by_name[each] for each in matching_names(list(by_name), name)]


def below(blocks: Sequence[Block], chosen: Iterable[Block]) -> list[Block]:
    """Return those of ``blocks`` that are ``chosen`` or in one that is, in order."""
    by_module = {block.module: block for block in blocks}
    wanted: set[str] = set()

    def add(block: Block) -> None:
        wanted.add(block.module)
        for child in block.children:
            add(by_module[child])

    for block in chosen:
        add(block)
    return [block for block in blocks if block.module in wanted]


def synthesize(
    config: NdpConfig,
    target: Target,
    *,
    units: Iterable[str] = (),
    recipe: str = AUTO,
    period_ps: float,
    flat: bool = False,
    wire_ff: float = 0.0,
    jobs: int | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> DesignResult:
    """Return area and timing of the device at the sizes of ``config``.

    Args:
        config: sizes.
        target: library.
        units: what `named_blocks` knows; these blocks and what is in them. All blocks where empty.
        recipe: a name that `plora.synth.mapping.recipes` knows.
        period_ps: clock period that logic is sized for.
        flat: map each of ``units``, or the whole device, in one piece with what is in it.
        wire_ff: wire load per pin in timing.
        jobs: Yosys processes at a time; as many as there are processors where ``None``.
        tell: called with a line of text when a block begins.

    Raises:
        UserError: a unit or recipe is not known, or a tool is missing.
        RuntimeError: Yosys failed.
    """
    chosen = recipes(recipe)
    blocks = design_blocks(config)
    wanted = [block for name in units for block in named_blocks(blocks, name)] or [blocks[-1]]
    chosen_blocks = flat_blocks(config, wanted) if flat else below(blocks, wanted)
    jobs = jobs or os.cpu_count() or 1
    flow = Flow(target, chosen, period_ps=period_ps, wire_ff=wire_ff, jobs=jobs, tell=tell)
    return DesignResult(config, tuple(flow.run(chosen_blocks)), flow.netlists)
