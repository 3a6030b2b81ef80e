"""examples/train_stdlib.py, which `make train` runs: on the GPU where there is one, in half of what its model data takes."""

from __future__ import annotations

import runpy
from collections.abc import Callable

import pytest

from patrickstar.cli.machines import MachineSource
from patrickstar.cli.models import ModelSource
from patrickstar.cli.predict import predict
from patrickstar.config.arguments import check_arguments
from tests.docs.pages import ROOT

Options = Callable[..., list[str]]


@pytest.fixture(scope="module")
def options() -> Options:
    found: Options = runpy.run_path(str(ROOT / "examples" / "train_stdlib.py"))["options"]
    return found


def flags(words: list[str]) -> dict[str, str]:
    return dict(zip(words[::2], words[1::2], strict=True))


@pytest.mark.parametrize("on_gpu", [False, True])
def test_it_trains_where_there_is_a_gpu_on_that(on_gpu: bool, options: Options) -> None:
    given = flags(options(on_gpu=on_gpu))
    assert given["--device"] == ("cuda" if on_gpu else "cpu")
    budget = "--device-memory" if on_gpu else "--host-memory"
    assert given[budget] == "919MiB"
    assert ("--disk" in given) is not on_gpu


def test_it_fits_a_card_of_24_gb_in_half_of_its_model_data(options: Options) -> None:
    given = flags(options(on_gpu=True))
    memory = check_arguments(precision="fp32", device_memory=given["--device-memory"])
    found = predict(
        ModelSource.find(given["--model"]).build_on_meta(),
        batch_size=int(given["--batch-size"]),
        seq_len=int(given["--seq-len"]),
        clip=False,
        arguments=memory,
        has=MachineSource.find("gpu-24g").resources(memory),
    )
    assert found.fits, found.refusal
    assert found.peak["device"] < found.model_data_bytes / 2
    assert found.moved["H>D"] > 0
