"""What Amaranth passes down while Verilog is emitted, so that repeated units are emitted once.

Amaranth emits a copy of a module for every instance: hundreds of equal dot units make megabytes of
Verilog that Yosys writes and Verilator reads back, slowly. A component that is used many times is
added with `add_shared`: as an ordinary submodule for Amaranth's own simulator, as an ``Instance`` of
one separately emitted module when Verilog is emitted.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from amaranth import Module
from amaranth.back import verilog
from amaranth.hdl import ClockSignal, Instance, ResetSignal, Value
from amaranth.lib import wiring


class EmitPlatform:
    """Collects the modules and the hand-written Verilog that an emitted design refers to.

    Attributes:
        modules: Verilog text of each shared module by name, in the order in which it is complete
            (a module comes after those it uses).
        sources: hand-written Verilog files that the design instantiates.
    """

    def __init__(self) -> None:
        self.modules: dict[str, str] = {}
        self.sources: dict[str, Path] = {}
        self._units: dict[str, tuple[type, Any]] = {}

    def add_source(self, path: Path) -> None:
        """Say that the design instantiates modules of the Verilog file ``path``.

        Raises:
            ValueError: another file of the same name was added.
        """
        if self.sources.setdefault(path.name, path) != path:
            raise ValueError(f"two Verilog files called {path.name}: {self.sources[path.name]} and {path}")

    def instance(self, name: str, component: wiring.Component) -> Instance:
        """Return an instance of the shared module ``name``, whose ports are the ports of ``component``.

        The first component of a name is emitted as that module; later ones only lend their ports.

        Raises:
            ValueError: an earlier component of that name has another class or other ports.
        """
        # Most are never elaborated, and rightly so: without this Amaranth warns that they were forgotten.
        component._MustUse__used = True
        unit = (type(component), component.signature)
        known = self._units.setdefault(name, unit)
        if known != unit:
            raise ValueError(
                f"shared module {name!r} stands for {known[0].__name__} with {known[1]!r}"
                f" and for {unit[0].__name__} with {unit[1]!r}"
            )
        if name not in self.modules:
            self.modules[name] = verilog.convert(component, name=name, platform=self, emit_src=False)
        ports: dict[str, Any] = {}
        for path, member, value in component.signature.flatten(component):
            direction = "i" if member.flow == wiring.In else "o"
            ports[f"{direction}_{'__'.join(map(str, path))}"] = Value.cast(value)
        header = re.search(rf"^module {re.escape(name)}\((.*?)\);", self.modules[name], re.MULTILINE | re.DOTALL)
        assert header is not None, f"no module {name} in the Verilog emitted for it"
        declared = {port.strip() for port in header[1].split(",")}
        # A unit without registers has no clock, one without resets no reset.
        if "clk" in declared:
            ports["i_clk"] = ClockSignal()
        if "rst" in declared:
            ports["i_rst"] = ResetSignal()
        return Instance(name, **ports)

    def verilog(self) -> str:
        """Return the Verilog of everything that was collected: hand-written files, then shared modules."""
        texts = [path.read_text() for _, path in sorted(self.sources.items())]
        return "\n".join([*texts, *self.modules.values()])


def add_shared(m: Module, platform: object, instance: str, module: str, component: wiring.Component) -> None:
    """Add ``component`` to ``m`` as the submodule ``instance``; connect its ports as usual.

    Args:
        m: the module that uses the component.
        platform: what `elaborate` was given. On an `EmitPlatform` the component becomes an instance
            of a module emitted once; on any other (``None`` in simulation) it is a plain submodule.
        instance: name of this use, for hierarchy and waves.
        module: name of the shared Verilog module. Components with the same name must be the same
            hardware: put every parameter that changes it into the name.
        component: the unit; its clock domain must be ``sync``.
    """
    if isinstance(platform, EmitPlatform):
        m.submodules[instance] = platform.instance(module, component)
    else:
        m.submodules[instance] = component
