import pytest

from patrickstar.cli.checkpoints import CheckpointFolder
from patrickstar.errors import ConfigError


class Session:
    """Writes the directory of a step, as a session does."""

    def save_checkpoint(self, directory, *, extra, keep):
        directory.mkdir(exist_ok=True)
        path = directory / "step-00000007"
        path.mkdir()
        (path / "index.json").write_text(f"{extra} {keep}")
        return path


def test_saving_makes_what_leads_to_the_directory_and_says_how_many_to_keep(tmp_path):
    folder = CheckpointFolder(tmp_path / "runs" / "one", keep=3)
    assert folder.save(Session(), extra={"a": 1}) == tmp_path / "runs" / "one" / "step-00000007"
    assert (folder.directory / "step-00000007" / "index.json").read_text() == "{'a': 1} 3"
    assert folder.steps() == [folder.directory / "step-00000007"]


def test_what_is_no_checkpoint_is_none(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-by-step").mkdir()
    assert CheckpointFolder(tmp_path, keep=1).steps() == []
    assert CheckpointFolder(tmp_path / "new", keep=1).steps() == []
    CheckpointFolder(tmp_path, keep=1).check_unused()


def test_starting_afresh_where_a_run_was_saved_is_refused(tmp_path):
    folder = CheckpointFolder(tmp_path, keep=2)
    folder.save(Session(), extra={})
    with pytest.raises(
        ConfigError, match="holds checkpoints already, the newest step-00000007; --resume goes on from it"
    ):
        folder.check_unused()
