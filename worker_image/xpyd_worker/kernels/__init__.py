"""What a forward computes besides its weights' shapes: one interface, several implementations.

`api` is the seam, `plain` torch's operators on any device (and the twin that tests the others),
`gpu` Triton's.
"""
