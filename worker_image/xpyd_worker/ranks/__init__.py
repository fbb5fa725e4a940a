"""The ranks of an instance, as processes: started, fed with steps, watched, ended.

    executor  ->  instance  ->  watcher, world  ->  pods  ->  start  ->  compute, watch  ->  step
    ->  link  ->  loss

The engine's process has `executor` (steps out, outputs in), `instance` (all ranks) and `watcher`
(the thread that takes all ranks down when one is lost). `world` is of replicas that share experts:
each has an instance, and the ranks of all are one world. docs/parallel.md, ADR 0033.
"""
