"""Which checkpoint is meant, and which one to take where that one is damaged."""

from __future__ import annotations

import logging
import os
import re

import pytest

from patrickstar.checkpoint.reader import newest_intact, open_step
from patrickstar.errors import CheckpointError
from tests.checkpoint.samples import flip, write


@pytest.fixture
def runs(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path, step)
    return tmp_path


def damage(directory, step: int) -> None:
    flip(next((directory / f"step-{step:08d}").glob("moments*")))


def test_latest_decides_and_a_step_can_be_named(runs):
    assert open_step(runs).step == 3
    assert open_step(runs / "step-00000001").step == 1
    (runs / "latest").write_text("step-00000002")  # as an editor may leave it
    assert open_step(runs).step == 2


def test_a_directory_may_be_reached_through_a_link_of_the_user_s_own(runs, tmp_path_factory):
    link = tmp_path_factory.mktemp("links") / "current"
    link.symlink_to(runs)
    assert open_step(link).step == 3


def test_a_copy_under_another_name_is_read(runs):
    (runs / "step-00000003").rename(runs / "best")
    assert open_step(runs / "best").step == 3


def test_the_newest_is_the_one_latest_names_then_the_one_written_last(runs):
    assert newest_intact(runs) == runs / "step-00000003"
    (runs / "latest").write_text("step-00000001\n")
    assert newest_intact(runs) == runs / "step-00000001"
    damage(runs, 1)
    index = runs / "step-00000002" / "index.json"
    newer = index.stat().st_mtime_ns + 10**12
    os.utime(index, ns=(newer, newer))
    assert newest_intact(runs) == runs / "step-00000002"
    for step in (2, 3):
        damage(runs, step)
    assert newest_intact(runs) is None
    assert newest_intact(runs / "nowhere") is None


def test_a_damaged_newest_is_refused_and_the_newest_intact_one_named(runs):
    damage(runs, 3)
    damage(runs, 2)
    with open_step(runs) as reader, pytest.raises(CheckpointError) as refused:
        reader.verify()
    assert str(refused.value).startswith(f"{runs / 'step-00000003'}/moments")
    assert str(refused.value).endswith(f"; the newest intact checkpoint is {runs / 'step-00000001'}: load that path")
    damage(runs, 1)
    with open_step(runs) as reader, pytest.raises(CheckpointError, match=rf"; no intact one is in {runs}"):
        reader.verify()


@pytest.mark.parametrize(
    "text", ["", "step-00000009\n", "../step-00000003\n", "step-3\n", "\xff\xfe", "/etc", "a\n" * 99]
)
def test_a_latest_that_names_no_step_is_refused_and_the_newest_intact_one_named(runs, text):
    (runs / "latest").write_text(text, encoding="latin-1")
    with pytest.raises(
        CheckpointError, match=rf"{runs}/latest: .*; the newest intact checkpoint is {runs}/step-00000003"
    ):
        open_step(runs)


def test_a_latest_or_a_step_that_is_a_link_is_refused(runs):
    (runs / "latest").rename(runs / "other")
    (runs / "latest").symlink_to(runs / "other")
    with pytest.raises(CheckpointError, match=r"latest: .*symbolic link"):
        open_step(runs)
    (runs / "latest").unlink()
    (runs / "other").rename(runs / "latest")
    (runs / "step-00000003").rename(runs / "moved")
    (runs / "step-00000003").symlink_to(runs / "moved")
    with pytest.raises(CheckpointError, match="names step-00000003, which is no directory"):
        open_step(runs)


def test_without_latest_the_checkpoint_written_last_is_taken_and_said(runs, caplog):
    (runs / "latest").unlink()
    with caplog.at_level(logging.WARNING, "patrickstar"):
        assert open_step(runs).step == 3
    assert "taking the checkpoint written last, step-00000003" in caplog.text


@pytest.mark.parametrize("path", ["nowhere", "step-00000009", "empty", "latest"])
def test_where_no_checkpoint_is_that_is_said(runs, path):
    (runs / "empty").mkdir()
    with pytest.raises(CheckpointError, match=re.escape(path)):
        open_step(runs / path)
