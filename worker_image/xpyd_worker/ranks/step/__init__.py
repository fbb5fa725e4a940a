"""A step on its way to the ranks and back: messages, encoder, decoder. Pure: it must not know
tensors, processes or sockets.
"""
