import numpy as np
import pytest

from patrickstar.cli import tokenizer as module
from patrickstar.cli.corpus import DataError, read_corpus
from patrickstar.cli.tokenizer import Tokenizer, encode, make_tokenizer
from patrickstar.errors import ConfigError

TEXT = "".join(f"{n} bottles stand on the wall; naïve café, 漢字 {n * n}.\n" for n in range(2000))


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return read_corpus([str(path)])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "patrickstar"


def tokens_of(tokenizer, texts):
    return encode(tokenizer, texts, advance=lambda _: None)


@pytest.mark.parametrize("vocab_size", [256, 257, 512])
def test_small_vocabularies_take_bytes(corpus, vocab_size, cache):
    tokenizer = make_tokenizer(corpus, vocab_size=vocab_size)
    assert tokenizer.description == "bytes"
    tokens = tokens_of(tokenizer, ["é1", "b"])
    end = [] if vocab_size == 256 else [256]
    assert tokens.tolist() == [0xC3, 0xA9, ord("1"), *end, ord("b"), *end]
    assert not cache.exists()


def test_a_trained_tokenizer_gives_the_text_back_within_the_vocabulary(corpus):
    tokenizer = make_tokenizer(corpus, vocab_size=600)
    tokens = tokens_of(tokenizer, [TEXT, "unseen: Ω\x7f"])
    assert tokens.max() < 600
    assert len(tokens) < len(TEXT) / 2
    ends = np.flatnonzero(tokens == tokenizer.separator)
    assert len(ends) == 2
    assert tokenizer.library.decode(tokens[: ends[0]].tolist()) == TEXT
    assert tokenizer.library.decode(tokens[ends[0] + 1 : ends[1]].tolist()) == "unseen: Ω\x7f"


def test_trained_again_it_gives_the_same_tokens_and_the_second_time_it_comes_from_the_cache(corpus, cache, monkeypatch):
    first = tokens_of(make_tokenizer(corpus, vocab_size=700), [TEXT])
    (file,) = cache.iterdir()
    for damage in (None, b"", b"{", b'{"version": "1.0"}'):
        file.unlink() if damage is None else file.write_bytes(damage)
        assert np.array_equal(first, tokens_of(make_tokenizer(corpus, vocab_size=700), [TEXT]))
        assert list(cache.iterdir()) == [file]
        assert len(file.read_bytes()) > 1000
    monkeypatch.setattr(module, "_train", None)
    assert np.array_equal(first, tokens_of(make_tokenizer(corpus, vocab_size=700), [TEXT]))


def test_another_vocabulary_or_another_text_has_another_cache_file(corpus, cache, tmp_path):
    make_tokenizer(corpus, vocab_size=700)
    make_tokenizer(corpus, vocab_size=701)
    (tmp_path / "other.txt").write_text(TEXT + "more", encoding="utf-8")
    make_tokenizer(read_corpus([str(tmp_path / "other.txt")]), vocab_size=700)
    assert len(list(cache.iterdir())) == 3


def test_where_the_cache_cannot_be_written_it_goes_on_without_and_leaves_no_half_file(
    corpus, cache, tmp_path, monkeypatch
):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.Path, "replace", full)
    assert len(tokens_of(make_tokenizer(corpus, vocab_size=700), [TEXT])) > 0
    assert list(cache.iterdir()) == []
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(tokens_of(make_tokenizer(corpus, vocab_size=700), [TEXT])) > 0


def test_a_vocabulary_smaller_than_the_bytes_is_refused(corpus):
    with pytest.raises(ConfigError, match="the model has 255 tokens; text needs at least the 256 bytes"):
        make_tokenizer(corpus, vocab_size=255)


def test_a_models_own_tokenizer_is_taken_and_must_fit_the_model(corpus, cache, tmp_path):
    make_tokenizer(corpus, vocab_size=700)
    (own,) = cache.iterdir()
    tokenizer = make_tokenizer(corpus, vocab_size=50_000, own=own)
    assert tokenizer.description == "the model's own tokenizer, 700 tokens"
    assert tokens_of(tokenizer, [TEXT]).max() < 700
    with pytest.raises(DataError, match="700 tokens, but the model has 699"):
        make_tokenizer(corpus, vocab_size=699, own=own)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="not a tokenizer"):
        make_tokenizer(corpus, vocab_size=700, own=tmp_path / "tokenizer.json")


def test_progress_counts_every_document(corpus):
    seen = []
    encode(Tokenizer(256), ["a"] * 40, advance=seen.append)
    assert sum(seen) == 40
    assert len(seen) > 1
