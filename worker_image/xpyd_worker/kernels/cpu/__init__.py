"""Operators for CPUs: C++ for what torch does in many steps, oneDNN's packed matrices for the rest.

`library` loads what the installation compiled, `kernels` implements the seam with it.
"""
