"""Planning without torch: which units move when, so that every moment fits. See `plan/make.py` for the way through.

    trace, layout, machine, start ── make_plan ──> Plan ──┬── check, simulate
                                                          └── carried out by the executor

`make_room` decides what must happen before a moment, and `residency.apply` is the only transition there is.
The planner and, at run time, the reactive pilot use the same two, so that what is simulated is what is executed.
"""
