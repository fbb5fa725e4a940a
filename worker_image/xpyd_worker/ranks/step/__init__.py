"""A step on its way to the ranks and back: messages, encoder, decoder, and the states that each
rank keeps of the sequences. It must not know processes or sockets.
"""
