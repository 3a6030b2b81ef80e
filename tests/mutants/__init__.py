"""Faults that the tests must find: `python -m tests.mutants` breaks a copy of the library, one fault after the other.

A mutant is one replacement in one file, and the few tests that must turn red for it. What every one of them stands for is a fault that
could be written by mistake and that most runs would hide: nothing crashes, some bytes are old.
"""
