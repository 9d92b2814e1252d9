"""The Verilated device in this process: a compiled test bench around it (`cpp/`) and its Python face (`device`).

Needs Verilator and a C++ compiler, not Amaranth's simulator; the host driver sees it as a `DevicePort`.
"""
