"""What a rank does with a step: the states that it keeps of the sequences, and its part of the
model. Its tensors are here; it must not know processes or sockets.
"""
