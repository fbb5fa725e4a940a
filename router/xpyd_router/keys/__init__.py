"""Client keys (ADR 0079): the file's lines, who a request comes from, what each key may use.

`lines` reads the file, `ring` finds the client of a request and counts what it uses, `watch` keeps
both up to date, `command` is `xpyd key`. Nothing here knows HTTP but two headers' names.
"""
