"""`xpyd advise`: how to divide a model over devices, with the numbers that say why.

    command (flags)  ->  checkpoint (files)  ->  facts (what the model is)
    facts  ->  fit (what a device holds)  ->  trees (which way)  ->  layout (the advice)  ->  report
    arithmetic: the formulas of all of them

All but command and checkpoint is pure. Nothing here imports torch or asks a device.
"""
