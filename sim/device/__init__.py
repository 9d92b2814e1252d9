"""The device in time: queue engine, core, memory channels and link port, with or without data."""
