"""What the processes of an instance send each other through: frames over sockets, and rings in
shared memory. It knows bytes, not what they mean.
"""
