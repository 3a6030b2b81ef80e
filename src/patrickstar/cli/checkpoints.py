"""The directory of `--checkpoint-dir`: whether a run was saved there, saving the next step, keeping the newest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patrickstar.errors import ConfigError

if TYPE_CHECKING:
    from patrickstar import Session


class CheckpointFolder:
    """Checkpoints of one run, one directory a step."""

    def __init__(self, directory: Path, *, keep: int) -> None:
        self.directory = directory
        self.keep = keep

    def steps(self) -> list[Path]:
        """The run's checkpoints, those written last first."""
        # The package of checkpoints loads torch, and this file is imported for `train --help`.
        from patrickstar.checkpoint.find import step_directories
        from patrickstar.memory.fileio import FileIO

        return step_directories(self.directory, FileIO()) if self.directory.is_dir() else []

    def check_unused(self) -> None:
        """Refuses to start afresh where another run's checkpoints lie: keeping the newest would delete them.

        Raises:
            ConfigError: there are some.
        """
        if found := self.steps():
            raise ConfigError(
                f"--checkpoint-dir {self.directory}: holds checkpoints already, the newest {found[0].name}; "
                "--resume goes on from it, another directory starts afresh"
            )

    def save(self, session: Session, *, extra: Mapping[str, Any]) -> Path:
        """Saves the session's step and gives its directory; deletes all but the newest `keep`."""
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        return session.save_checkpoint(self.directory, extra=extra, keep=self.keep)

    def load(self, session: Session) -> Mapping[str, Any]:
        """Loads the newest checkpoint and gives its extra.

        Raises:
            CheckpointError: it is damaged; the message names the newest one that is not.
        """
        return session.load_checkpoint(self.directory)
