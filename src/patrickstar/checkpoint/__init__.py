"""Checkpoints: one directory a step, safetensors files and a JSON index, readable without this library.

Written so that a crash never loses an earlier one (`storage.py`), read so that nothing damaged is taken (`reader.py`).
"""
