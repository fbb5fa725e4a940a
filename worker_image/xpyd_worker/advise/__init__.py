"""`xpyd advise`: how to divide a model over devices, with the numbers that say why.

    command (flags)  ->  checkpoint (files)  ->  facts (what the model is)
                                                   |
    table, document  <-  layout (what fits)  <-  trees (which way)  <-  arithmetic (formulas)

All but command and checkpoint is pure. Nothing here imports torch or asks a device.
"""
