"""Tokenizers of text: bytes where they are enough for the model's vocabulary, else a BPE trained on the corpus.

A trained tokenizer is kept in the user's cache directory, named by all that it depends on. The cache is a convenience:
where it cannot be read or written, the tokenizer is trained again, with the same outcome.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import tokenizers
from numpy.typing import NDArray

from patrickstar.cli.corpus import Corpus, DataError
from patrickstar.errors import ConfigError

Tokens = NDArray[np.int32]

BYTES: Final = 256
# Up to here a trained vocabulary would hold little more than the bytes themselves.
ENOUGH_FOR_BYTES: Final = 512
END_OF_TEXT: Final = "<|endoftext|>"
# Documents encoded in one call: enough to keep all cores busy, few enough that their encodings stay small.
_TOGETHER: Final = 16
_CACHE_FORMAT: Final = "1"


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Gives the tokens of documents, and the one between two of them where the vocabulary has one.

    `library`: a tokenizer of that library, trained here or come with a model's weights; None: every byte of the UTF-8 text is a token.
    """

    separator: int | None
    description: str = "bytes"
    library: Any = None

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        if self.library is None:
            return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32) for text in texts]
        encodings = self.library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int32) for encoding in encodings]


def make_tokenizer(corpus: Corpus, *, vocab_size: int, own: Path | None = None) -> Tokenizer:
    """The tokenizer for a model of a vocabulary: the model's `own` one, bytes, the cached one, or a newly trained one.

    Raises:
        ConfigError: a vocabulary smaller than the 256 bytes that any text may need.
        DataError: the model's own tokenizer cannot be read, or has more tokens than the model.
    """
    if own is not None:
        return _own(own, vocab_size)
    if vocab_size < BYTES:
        raise ConfigError(f"the model has {vocab_size} tokens; text needs at least the {BYTES} bytes")
    if vocab_size <= ENOUGH_FOR_BYTES:
        return Tokenizer(BYTES if vocab_size > BYTES else None)
    home = os.environ.get("XDG_CACHE_HOME") or f"{os.environ.get('HOME', '')}/.cache"
    what = f"{_CACHE_FORMAT} {tokenizers.__version__} {vocab_size} {corpus.digest}"
    file = Path(home) / "patrickstar" / f"tokenizer-{hashlib.sha256(what.encode()).hexdigest()[:32]}.json"
    tokenizer = _read_cached(file, vocab_size)
    if tokenizer is None:
        tokenizer = _train(corpus, vocab_size)
        _write_cached(file, tokenizer)
    return Tokenizer(tokenizer.token_to_id(END_OF_TEXT), f"byte-level BPE of {vocab_size} tokens", tokenizer)


def encode(tokenizer: Tokenizer, texts: Sequence[str], *, advance: Callable[[int], None]) -> Tokens:
    """All documents as one stream of tokens; tells `advance` how many documents each round has done."""
    end = np.array([] if tokenizer.separator is None else [tokenizer.separator], np.int32)
    pieces: list[Tokens] = []
    for start in range(0, len(texts), _TOGETHER):
        some = texts[start : start + _TOGETHER]
        for tokens in tokenizer.encode(some):
            pieces += (tokens, end)
        advance(len(some))
    return np.concatenate(pieces) if pieces else end


def _own(path: Path, vocab_size: int) -> Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception for a damaged file
        raise DataError(f"{path}: not a tokenizer: {error}") from error
    # A batch has no padding and no truncation of its own: documents are cut into windows later.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    count = tokenizer.get_vocab_size()
    if count > vocab_size:
        raise DataError(f"{path}: {count} tokens, but the model has {vocab_size}")
    return Tokenizer(tokenizer.token_to_id(END_OF_TEXT), f"the model's own tokenizer, {count} tokens", tokenizer)


def _train(corpus: Corpus, vocab_size: int) -> Any:
    trained = tokenizers.ByteLevelBPETokenizer()
    how = {"vocab_size": vocab_size, "min_frequency": 0, "special_tokens": [END_OF_TEXT], "show_progress": False}
    trained.train_from_iterator(corpus.train, **how)
    return tokenizers.Tokenizer.from_str(trained.to_str())


def _read_cached(file: Path, vocab_size: int) -> Any | None:
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception:  # the library raises a bare Exception; a damaged copy is as good as none
        return None
    return tokenizer if BYTES < tokenizer.get_vocab_size() <= vocab_size else None


def _write_cached(file: Path, tokenizer: Any) -> None:
    """Writes a tokenizer aside and renames it, so that nobody ever reads half a file."""
    aside = file.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            aside.write_text(tokenizer.to_str(), encoding="utf-8")
            aside.replace(file)
        finally:
            aside.unlink(missing_ok=True)
