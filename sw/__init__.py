"""Host software: driver, tiling, adapters, strategies, inputs, command line. May use `plora.sim` and `plora.hw`."""
