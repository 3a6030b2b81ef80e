"""Checkpoints: one directory a step, safetensors files and a JSON index, readable without this library.

Written so that a crash never loses an earlier one (`storage.py`), read so that nothing damaged is taken (`reader.py`).
"""

from __future__ import annotations

from patrickstar.checkpoint.find import newest_intact, open_step
from patrickstar.checkpoint.lazy_state_dict import LazyStateDict
from patrickstar.checkpoint.reader import StepReader
from patrickstar.checkpoint.storage import write_step
from patrickstar.checkpoint.tensors import TensorEntry

__all__ = ["LazyStateDict", "StepReader", "TensorEntry", "newest_intact", "open_step", "write_step"]
