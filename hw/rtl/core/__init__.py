"""The NDP core: everything between the queue engine and the memory channels that computes.

`core.NdpCore` is the whole; `signature` its ports. Inside, in the order in which a descriptor
passes: instruction buffer, decoder, fetch (operand loader and weight reader), buffers, beat
sequencer, PE array, output buffer, result writer.
"""
