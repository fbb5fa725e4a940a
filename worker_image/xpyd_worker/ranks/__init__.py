"""The ranks of an instance, as processes: started, fed with steps, watched, ended.

    executor  ->  instance  ->  watcher  ->  pods  ->  start  ->  compute, watch  ->  step  ->  link
    ->  loss

The engine's process has `executor` (steps out, outputs in), `instance` (all ranks) and `watcher`
(the thread that takes all ranks down when one is lost). docs/parallel.md, ADR 0033.
"""
