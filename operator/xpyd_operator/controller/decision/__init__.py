"""What one turn of a fleet knows and decides, as values. Pure: no I/O, no clock.

    cache --FleetState--> decide --Turn--> (reconcile writes) --> report --> (reconcile writes)

`kinds` has the API's objects, `errors` what a call may end in, `cache` the latest objects of
each fleet, `state` what a turn sees, `history` what earlier turns left, `decide` and `report` the
writes. See journey 3 of docs/architecture.md.
"""
