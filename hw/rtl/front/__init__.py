"""The device's front end: registers, queues, memory channels and the host's path to memory."""
