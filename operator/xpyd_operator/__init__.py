"""From a fleet document to running pods.

api     the document: typed, bounded, refused with every mistake named
plan    what should run, and what to do next: pure
local   `xpyd up` and its sister commands: pods as processes on this machine
"""
