"""PEFT adapters: read from ``adapter_config.json`` + ``adapter_model.safetensors``, made ready for the device.

`read_adapter` gives the matrices in float32 as the file means them; `to_device` rounds one module to what
the device computes with. What the device does not compute is refused by name, or listed in
`Adapter.host_parts`.
"""

from plora.sw.adapters.device_form import DeviceModule, device_values, host_values, to_device
from plora.sw.adapters.reader import Adapter, HostPart, LoraModule, read_adapter

__all__ = [
    "Adapter",
    "DeviceModule",
    "HostPart",
    "LoraModule",
    "device_values",
    "host_values",
    "read_adapter",
    "to_device",
]
