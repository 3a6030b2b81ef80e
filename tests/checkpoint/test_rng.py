"""Generators go on where they were."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from patrickstar.checkpoint import rng
from patrickstar.checkpoint.reader import open_step
from patrickstar.errors import CheckpointError
from tests.checkpoint.samples import write


def draws() -> list[object]:
    return [
        torch.randn(5).tolist(),
        torch.randperm(20).tolist(),
        random.random(),
        random.gauss(0, 1),
        np.random.rand(3).tolist(),
        np.random.standard_normal(),
        torch.nn.functional.dropout(torch.ones(64)).tolist(),
    ]


def numpy_words() -> list[int]:
    return np.random.get_state()[1].tolist()


@pytest.fixture(autouse=True)
def unchanged_generators():
    before = rng.capture()
    yield
    rng.restore(before)


def test_all_three_go_on_where_they_were_after_a_checkpoint(tmp_path):
    draws()  # odd numbers of normal draws: Python and NumPy keep the second one
    write(tmp_path, 1, state={"rng": rng.capture()})
    expected = draws()
    draws()
    with open_step(tmp_path) as reader:
        rng.restore(reader.values["state"]["rng"])
    assert draws() == expected


def test_capturing_draws_nothing():
    before = torch.get_rng_state(), random.getstate(), numpy_words()
    rng.capture()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert numpy_words() == before[2]


def spoilt(**changes: object) -> dict[str, object]:
    return {**rng.capture(), **changes}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda: None,
        dict,
        lambda: spoilt(cuda=1),
        lambda: spoilt(torch=torch.zeros(10, dtype=torch.uint8)),
        lambda: spoilt(torch=torch.zeros(5056)),
        lambda: spoilt(torch="state"),
        lambda: spoilt(python=None),
        lambda: spoilt(python={"version": 3, "words": torch.zeros(3, dtype=torch.int64), "gauss": None}),
        lambda: spoilt(python={**rng.capture()["python"], "version": 9}),
        lambda: spoilt(python={**rng.capture()["python"], "gauss": "a lot"}),
        lambda: spoilt(python={**rng.capture()["python"], "words": torch.full((625,), -1)}),
        lambda: spoilt(numpy=None),
        lambda: spoilt(numpy={**rng.capture()["numpy"], "bit_generator": "seed"}),
        lambda: spoilt(numpy={**rng.capture()["numpy"], "bit_generator": "PCG64"}),
        lambda: spoilt(numpy={**rng.capture()["numpy"], "state": {}}),
    ],
)
def test_what_is_no_state_is_refused_and_changes_no_generator(spoil):
    tree = spoil()
    draws()
    before = rng.capture()
    expected = draws()
    rng.restore(before)
    for refuses in (rng.check, rng.restore):
        with pytest.raises(CheckpointError, match=r"^rng: "):
            refuses(tree)
    assert draws() == expected


def test_a_state_without_numpy_leaves_numpy_alone():
    tree = rng.capture()
    del tree["numpy"]
    expected = numpy_words()
    rng.restore(tree)
    assert numpy_words() == expected
