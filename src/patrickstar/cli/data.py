"""What `--data` means: text, or the word `random`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from patrickstar.cli.display import Display
from patrickstar.cli.random_data import RandomData
from patrickstar.cli.text_data import TextData
from patrickstar.errors import ConfigError

RANDOM: Final = "random"

Data = TextData | RandomData


def prepare_data(given: Sequence[str], *, vocab_size: int, own_tokenizer: Path | None, display: Display) -> Data:
    """The tokens of a run, read and encoded, or drawn; says which.

    Raises:
        ConfigError: `random` beside paths.
        ConfigError, DataError: see `TextData.prepare`.
    """
    if RANDOM not in given:
        return TextData.prepare(given, vocab_size=vocab_size, own_tokenizer=own_tokenizer, display=display)
    if len(given) > 1:
        raise ConfigError(
            f"--data {' '.join(given)}: {RANDOM} stands for random tokens and goes with nothing else; "
            f"leave it out, or the rest (a file of that name is ./{RANDOM})"
        )
    return RandomData.prepare(vocab_size=vocab_size, display=display)
