"""Faults that the tests must find: `python -m tests.mutants` breaks a copy of the library, one fault after the other.

A mutant is a place in the library, what is done to its code, and the few tests that must turn red for it:

    Fault("a-copy-that-reads-is-forgotten", "memory.works_under_way:Readiness.read").by(drop("append"), *TRAINING)

What every one of them stands for is a fault that could be written by mistake and that most runs would hide: nothing crashes, some bytes
are old. `operators.py` has what can be done to code. A mutant has to be changed only when a name in it does: the fewer, the better.
"""
