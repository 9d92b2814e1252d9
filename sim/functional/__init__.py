"""The functional device: what the NDP device does to memory, without its time.

`FunctionalDevice` implements `plora.hw.defs.port.DevicePort` and leaves in host-managed device memory
exactly the bytes that the RTL leaves there, but for the ``cycles`` field of completion lines.
"""

from plora.sim.functional.device import FunctionalDevice

__all__ = ["FunctionalDevice"]
