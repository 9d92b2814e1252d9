"""The NDP device: shared definitions (`plora.hw.defs`, plain Python) and the RTL in Amaranth (`plora.hw.rtl`)."""
