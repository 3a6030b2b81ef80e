"""Stopping and resuming gives the bits of not stopping; a checkpoint that is not whole changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import patrickstar
from patrickstar import CheckpointError, ConfigError
from tests.checkpoint.samples import flip, resize
from tests.parity.compare import same_bits
from tests.session.builders import (
    ROOMY,
    MakePair,
    Pair,
    adamw,
    assert_same,
    everything,
    expect_bits,
    finish,
    mlp,
    options,
    train,
    transposed,
    values,
)


def noisy() -> nn.Module:
    """Dropout, buffers and weights of two sizes."""
    torch.manual_seed(0)
    return nn.Sequential(mlp(), nn.Dropout(0.3), nn.BatchNorm1d(32), nn.Linear(32, 100), nn.Linear(100, 7))


def noisy_step(model: nn.Module, optimizer: Any, scheduler: Any) -> torch.Tensor:
    """The batch is drawn from torch's, Python's and NumPy's random numbers."""
    x = torch.randn(4, 32) + random.random() + float(np.random.rand())
    loss = model(x).square().mean()
    finish(loss, optimizer)
    scheduler.step()
    return loss.detach().clone()


def seed_everything() -> None:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)


class Run:
    """A training run under a session, with a scheduler on the original optimizer."""

    def __init__(self, chunk_size: int = 2048, **keywords: Any) -> None:
        self.model = noisy()
        original = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = lr_scheduler.StepLR(original, 2, gamma=0.5)
        self.session = patrickstar.manage(self.model, original, options=options(chunk_size=chunk_size), **keywords)

    def steps(self, count: int) -> list[torch.Tensor]:
        return [noisy_step(self.model, self.session.optimizer, self.scheduler) for _ in range(count)]


def everything_of(run: Run) -> dict[str, torch.Tensor]:
    return everything(run.session) | {"rng": torch.get_rng_state(), "python": torch.tensor(random.random())}


TIERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "emulated": lambda disk: {"device": "emulated", "device_memory": "96KiB"},
    "cpu+disk": lambda disk: {"device": "cpu", "host_memory": "96KiB", "disk": disk},
    "roomy": lambda disk: dict(ROOMY),
    "larger": lambda disk: {"device": "emulated", "device_memory": "160KiB"},
}


@pytest.mark.parametrize(
    ("before", "after", "chunk_sizes"),
    [
        ("emulated", "emulated", (2048, 2048)),
        ("cpu+disk", "cpu+disk", (2048, 2048)),
        ("emulated", "cpu+disk", (2048, 1024)),
        ("cpu+disk", "emulated", (1024, 3072)),
        ("roomy", "emulated", (8192, 2048)),
        ("emulated", "larger", (2048, 2048)),
    ],
)
def test_stopping_and_resuming_gives_the_bits_of_not_stopping(
    tmp_path: Path, before: str, after: str, chunk_sizes: tuple[int, int]
) -> None:
    seed_everything()
    straight = Run(chunk_sizes[0], **TIERS[before](tmp_path / "0"))
    with straight.session:
        straight.steps(3)
        path = straight.session.save_checkpoint(tmp_path / "run", extra={"scheduler": straight.scheduler, "epoch": 4})
        assert path == tmp_path / "run" / "step-00000003"
        want = straight.steps(3)
        expected = everything_of(straight)
    seed_everything()
    torch.rand(5)
    resumed = Run(chunk_sizes[1], **TIERS[after](tmp_path / "1"))
    with resumed.session:
        resumed.steps(1)  # another run, which the checkpoint takes the place of
        extra = resumed.session.load_checkpoint(tmp_path / "run")
        assert extra["epoch"] == 4
        resumed.scheduler.load_state_dict(extra["scheduler"])
        got = resumed.steps(3)
        expect_bits(expected, everything_of(resumed))
        assert resumed.session.save_checkpoint(tmp_path / "more").name == "step-00000006"
    assert all(same_bits(a, b) for a, b in zip(want, got, strict=True))


def test_a_step_of_its_own_is_loaded_by_its_directory(pair: Pair, tmp_path: Path) -> None:
    paths, kept = [], []
    for number in range(3):
        pair.train(1, first=number)
        paths.append(pair.session.save_checkpoint(tmp_path, extra={"number": number}))
        kept.append(everything(pair.session))
    assert [path.name for path in paths] == ["step-00000001", "step-00000002", "step-00000003"]
    assert pair.session.load_checkpoint(paths[0]) == {"number": 0}
    expect_bits(kept[0], everything(pair.session))
    assert pair.session.load_checkpoint(tmp_path) == {"number": 2}
    expect_bits(kept[2], everything(pair.session))


def test_saving_draws_no_random_number_and_changes_nothing(pair: Pair, tmp_path: Path) -> None:
    for number in range(3):
        pair.train(1, first=number)
        state = torch.get_rng_state(), random.getstate()
        pair.session.save_checkpoint(tmp_path)
        assert torch.equal(state[0], torch.get_rng_state())
        assert state[1] == random.getstate()
    pair.expect_same()
    assert pair.session.stats().planned_steps == 3


def test_weights_in_another_order_of_memory_come_back_with_their_moments(make_pair: MakePair, tmp_path: Path) -> None:
    pair = make_pair(transposed)
    pair.train(2)
    pair.session.save_checkpoint(tmp_path)
    want = everything(pair.session)
    pair.train(1, first=2)
    pair.session.load_checkpoint(tmp_path)
    expect_bits(want, everything(pair.session))


def test_a_checkpoint_before_the_first_step(make_pair: MakePair, tmp_path: Path) -> None:
    first, second = make_pair(), make_pair(lambda: mlp(5))
    first.session.save_checkpoint(tmp_path)
    second.train(2)
    second.session.load_checkpoint(tmp_path)
    first.train(2)
    train(second.model, second.optimizer, 2)
    assert_same(first.plain, first.plain_optimizer, second.session)


def test_saving_in_the_background_is_not_there_yet(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="wait"):
        pair.session.save_checkpoint(tmp_path, wait=False)


def test_only_the_newest_are_kept_where_that_is_asked_for(pair: Pair, tmp_path: Path) -> None:
    for number in range(4):
        pair.train(1, first=number)
        pair.session.save_checkpoint(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000003", "step-00000004"]


# what is not whole


def files_of(checkpoint: Path) -> list[Path]:
    found = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    assert found
    return found


@pytest.fixture
def saved(make_pair: MakePair, tmp_path: Path) -> tuple[Pair, Path]:
    """A pair that has gone on for a step since its checkpoint."""
    pair = make_pair()
    pair.train(2)
    path = pair.session.save_checkpoint(tmp_path / "run", extra={"a": torch.arange(100)})
    pair.train(1, first=2)
    return pair, path


DAMAGE: dict[str, Callable[[Path], object]] = {
    **{f"a bit at {at}": partial(flip, at=at) for at in (0, 20, 200, -200, -1)},
    **{f"cut to {to}": partial(resize, to=to) for to in (0.0, 0.5, 0.99)},
    "missing": Path.unlink,
}


def expect_refused(pair: Pair, path: Path) -> None:
    held, state = everything(pair.session), (torch.get_rng_state(), random.getstate())
    lr = pair.original.param_groups[0]["lr"] = 0.0625
    pair.plain_optimizer.param_groups[0]["lr"] = lr
    with pytest.raises(CheckpointError):
        pair.session.load_checkpoint(path)
    assert torch.equal(state[0], torch.get_rng_state())
    assert state[1] == random.getstate()
    assert pair.original.param_groups[0]["lr"] == lr
    expect_bits(held, everything(pair.session))
    pair.train_same(1, first=3)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_before_anything_has_changed(saved: tuple[Pair, Path], damage: str) -> None:
    """In each file; `tests/checkpoint` has more kinds of it, and what is said."""
    pair, path = saved
    for file in files_of(path):
        before = file.read_bytes()
        DAMAGE[damage](file)
        with pytest.raises(CheckpointError):
            pair.session.load_checkpoint(path)
        file.write_bytes(before)
    DAMAGE[damage](max(files_of(path), key=lambda file: file.stat().st_size))
    expect_refused(pair, path)


def grouped(*at: int) -> Callable[[nn.Module], Any]:
    """Groups of layers up to these: hyper-parameters would go to parameters that they were not meant for."""

    def make(model: nn.Module) -> Any:
        ends = list(zip((0, *at), (*at, len(model)), strict=True))
        return patrickstar.AdamW(
            [{"params": list(model[one:other].parameters()), "lr": 0.1 * (one + 1)} for one, other in ends]
        )

    return make


OTHERS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], str | None]] = {
    "fewer layers": (lambda: mlp(layers=5), adamw, None),
    "more layers": (lambda: mlp(layers=7), adamw, None),
    "other shapes": (lambda: nn.Sequential(*list(mlp())[:-2], nn.Linear(32, 31)), adamw, None),
    "other names": (lambda: nn.ModuleDict({"net": mlp()}), adamw, None),
    "buffers": (lambda: nn.Sequential(*mlp(), nn.BatchNorm1d(32, affine=False)), adamw, None),
    "fewer groups": (lambda: mlp(4), adamw, "group"),
    "other groups": (lambda: mlp(4), grouped(8), "group"),
}


@pytest.mark.parametrize(("build", "make_optimizer", "says"), OTHERS.values(), ids=OTHERS)
def test_a_checkpoint_of_another_model_or_other_groups_is_refused_before_anything_has_changed(
    make_pair: MakePair, tmp_path: Path, build: Any, make_optimizer: Any, says: str | None
) -> None:
    pair = make_pair(make_optimizer=grouped(4) if says else adamw)
    pair.train(1)
    path, model = pair.session.save_checkpoint(tmp_path), build()
    with patrickstar.manage(model, make_optimizer(model), options=options(), **ROOMY) as session:
        before = values(model)
        with pytest.raises(CheckpointError, match=says):
            session.load_checkpoint(path)
        expect_bits(before, values(session))


def test_a_checkpoint_without_a_random_state_is_refused_before_anything_has_changed(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.train(2)
    with monkeypatch.context() as patch:
        patch.setattr("patrickstar.checkpoint.rng.capture", lambda device=None: {"torch": torch.get_rng_state()})
        pair.session.save_checkpoint(tmp_path / "run")
    pair.train(1, first=2)
    expect_refused(pair, tmp_path / "run")


def test_a_checkpoint_is_loaded_while_one_that_is_damaged_lies_beside_it(saved: tuple[Pair, Path]) -> None:
    pair, path = saved
    newer = pair.session.save_checkpoint(path.parent)
    resize(max(files_of(newer), key=lambda file: file.stat().st_size), to=0.5)
    with pytest.raises(CheckpointError, match=newer.name):
        pair.session.load_checkpoint(path.parent)
    pair.session.load_checkpoint(path)
    plain = mlp()
    oracle = adamw(plain)
    train(plain, oracle, 2)
    assert_same(plain, oracle, pair.session)
