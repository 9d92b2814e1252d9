"""The NDP device in Amaranth HDL. One component a file; `plora.hw.rtl.device.NdpDevice` is the top."""
