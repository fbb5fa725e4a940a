"""Brings a checkpoint into a folder: `xpyd model download`, and `--model s3://...` of a worker.

`plan` decides: which files, which parts, what a checksum must be, what a manifest says. `sources`
knows S3 and the hub, `folder` what is on the disk and whose turn it is, `transfer` moves the bytes,
`command` shows them to people and machines. See docs/adr/0081.
"""
