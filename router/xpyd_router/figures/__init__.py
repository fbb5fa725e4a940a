"""What is counted for every request and every token: plain cells, no lock; text when asked for.

The client library's metrics take a lock and about a microsecond each, and write 1 to 10 us of text
per line on the event loop; a hundred instances have some 6,000 lines. What is counted rarely stands
in `metrics` as the library's own.
"""
