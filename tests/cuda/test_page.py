"""The page about GPUs says what is so."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from tests.docs import run_page
from tests.docs.pages import ROOT

if TYPE_CHECKING:
    import pytest

    from tests.accelerator.cuda import Accelerator


def test_its_snippets_run_as_written(accelerator: Accelerator, capsys: pytest.CaptureFixture[str]) -> None:
    accelerator.configure(0.5, 4)
    assert run_page.main(ROOT / "docs" / "gpu.md") == 0, capsys.readouterr().err
    gc.collect()
