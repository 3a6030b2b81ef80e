"""Tests on a GPU that this machine has: `python -m tests.gpu`."""
