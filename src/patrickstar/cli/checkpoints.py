"""The directory of `--checkpoint-dir`: what was saved there, and whether a run may start afresh."""

from __future__ import annotations

from pathlib import Path

from patrickstar.errors import ConfigError


def saved_steps(directory: Path | None) -> list[Path]:
    """The checkpoints in a directory, one a step, those written last first."""
    # The package of checkpoints loads torch, and this file is imported for `train --help`.
    from patrickstar.checkpoint.find import step_directories
    from patrickstar.memory.fileio import FileIO

    return step_directories(directory, FileIO()) if directory is not None and directory.is_dir() else []


def check_unused(directory: Path | None) -> None:
    """Refuses to start afresh where another run's checkpoints lie: keeping the newest would delete them.

    Raises:
        ConfigError: there are some.
    """
    if found := saved_steps(directory):
        raise ConfigError(
            f"--checkpoint-dir {directory}: holds checkpoints already, the newest {found[0].name}; "
            "--resume goes on from it, another directory starts afresh"
        )
