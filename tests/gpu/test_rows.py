"""Rows of the parity matrix on a GPU, each against plain PyTorch there: one of each model, then as many others as there is time for."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch

from tests.cuda import test_parity
from tests.cuda.schedules import Accelerator
from tests.cuda.test_parity import ROWS, assert_parity, schedule_of
from tests.parity.matrix import Row
from tests.parity.zoo import CASES

# In an order that has nothing to do with the matrix's own, so that any number of them is a fair sample.
ONE_OF_EACH_MODEL = [
    min((row for row in ROWS if row.model == model), key=lambda row: (row.budget == "fits", row.accumulation))
    for model in CASES
]
OTHERS = sorted(set(ROWS) - set(ONE_OF_EACH_MODEL), key=lambda row: zlib.crc32(str(row).encode()))

UNTRACED = {"lstm", "mixtral"}  # cuDNN's has no fake counterpart, and experts count their tokens there


@pytest.mark.device_only
@pytest.mark.parametrize("row", [*ONE_OF_EACH_MODEL, *OTHERS], ids=str)
def test_no_bit_depends_on_where_model_data_lives(
    row: Row, tmp_path: Path, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        test_parity, "restrict", lambda *_: torch.cuda.empty_cache()
    )  # a GPU has the memory that it has
    assert_parity(row, tmp_path, accelerator, schedule_of(row), has_trace=row.model not in UNTRACED)
