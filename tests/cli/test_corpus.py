import pytest

from patrickstar.cli.corpus import DataError, read_corpus
from patrickstar.errors import ConfigError


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path):
    """Forty texts, 4 KB each, told apart by their number."""
    for n in range(40):
        write(tmp_path / "texts" / f"{n:02}" / "a.txt", f"number {n} " * 400)
    return tmp_path / "texts"


def test_without_data_the_standard_library_is_read_without_its_tests():
    corpus = read_corpus([])
    assert corpus.nbytes > 4_000_000
    assert any("class OrderedDict" in text for text in (*corpus.train, *corpus.validation))
    assert not any("class BaseTestDict" in text for text in corpus.train)


def test_whole_files_are_held_out_and_in_no_batch(folder):
    corpus = read_corpus([str(folder)])
    assert len(corpus.train) + len(corpus.validation) == 40
    assert set(corpus.train).isdisjoint(corpus.validation)
    held_out = sum(map(len, corpus.validation)) / (corpus.nbytes)
    assert 0.01 <= held_out <= 0.1


def test_the_same_files_give_the_same_corpus_and_another_file_another(folder):
    first, again = read_corpus([str(folder)]), read_corpus([str(folder)])
    assert first == again
    write(folder / "new.txt", "one more")
    assert read_corpus([str(folder)]).digest != first.digest


def test_of_a_single_file_the_tail_is_held_out(tmp_path):
    text = "".join(f"line {n}\n" for n in range(1000))
    corpus = read_corpus([str(write(tmp_path / "one.txt", text))])
    assert corpus.train[0] + corpus.validation[0] == text
    assert len(corpus.validation[0]) == len(text) // 10


def test_where_no_file_is_small_enough_the_tail_of_the_largest_is_held_out(tmp_path):
    small, large = write(tmp_path / "a.txt", "a" * 3000), write(tmp_path / "b.txt", "b" * 4000)
    corpus = read_corpus([str(small), str(large)])
    assert corpus.train == ("a" * 3000, "b" * 3600)
    assert corpus.validation == ("b" * 400,)


def test_a_file_named_twice_counts_once(tmp_path):
    one = write(tmp_path / "one.txt", "word " * 1000)
    assert read_corpus([str(one), str(one)]) == read_corpus([str(one), str(tmp_path / "." / "one.txt")])
    assert read_corpus([str(one), str(one)]).nbytes == 5000


def test_in_a_directory_what_is_no_text_is_skipped_and_counted(folder):
    before = read_corpus([str(folder)])
    (folder / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    (folder / "zeros.bin").write_bytes(b"a\0b")
    (folder / "empty.txt").write_bytes(b"")
    write(folder / ".git" / "config", "hidden")
    corpus = read_corpus([str(folder)])
    assert corpus.skipped == 2
    assert (corpus.train, corpus.validation) == (before.train, before.validation)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("given.txt", b"", "the file is empty"),
        ("given.txt", b" \n\t\n", "the file is empty"),
        ("given.txt", b"caf\xe9", "not UTF-8 text: byte 3 is 0xe9"),
        ("given.txt", b"ab\0cd", "not text: character 2 is a zero byte"),
        (".", b"\xff\xff", r"no text in this directory .1 files are not UTF-8 text"),
        ("missing.txt", b"", "no such file or directory"),
    ],
)
def test_what_is_no_text_is_refused_by_name(tmp_path, name, content, says):
    (tmp_path / "given.txt").write_bytes(content)
    with pytest.raises(ConfigError if name == "missing.txt" else DataError, match=says) as error:
        read_corpus([str(tmp_path / name)])
    assert str(tmp_path / name) in str(error.value)
