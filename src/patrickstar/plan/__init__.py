"""Planning without torch: which units move when, so that every moment fits. See `plan/planner.py` for the way through.

`make_room` decides what must happen before a moment, and `residency.apply` is the only transition there is:
for the planner and, at run time, for the reactive pilot.
"""
