"""Models: bit-exact golden functions, timing of the device and of whole systems. May use `plora.hw.defs`."""
