"""From Amaranth components to something that runs: tools, Verilog emission, Verilator builds and their cache.

`toolchain` and `cache` need nothing but Python; Amaranth is imported only where Verilog is emitted.
"""
