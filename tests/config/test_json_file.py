import json

import pytest

from patrickstar import ConfigError
from patrickstar.config.engine.read import read_config
from patrickstar.config.json_file import read_json


@pytest.fixture
def written(tmp_path):
    def write(content):
        path = tmp_path / "config.json"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def test_a_file_is_read_by_either_kind_of_path(written):
    config = {"optimizer": {"params": {"betas": [0.9, 0.95]}}, "train_batch_size": 5e8}
    path = written(json.dumps(config))
    assert read_json(path) == read_json(str(path)) == config
    assert read_config(str(path)).optimizer.betas == (0.9, 0.95)
    assert read_config(path).micro_batch_size == 500_000_000


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{,}", "line 1 column 2"),
        ('{\n  "a": 1,\n}', "line "),
        ('{"a": 1 // note\n}', "line 1 column 9"),
        ("", "line 1 column 1"),
        ('{"gradient_clipping": NaN}', "gradient_clipping: nan: expected a finite number"),
        ('{"a": 1, "a": 2}', "twice in one object: a"),
        ('{"o": {"b": 1, "c": 2, "b": 1, "c": 3}}', "twice in one object: b, c"),
        ('{"a": 1}{"b": 2}', "Extra data"),
        (b'\xef\xbb\xbf{"a": 1}', "BOM"),
        ("[1]", "expected a JSON object, as in {...}, not list"),
        (b"\xff\xfe", "can't decode byte 0xff in position 0"),
        ("[" * 100_000, "config"),
        ('{"a": ' + "9" * 5000 + "}", "config"),
    ],
)
def test_a_file_that_is_no_config_is_refused_with_the_place(written, content, why):
    path = written(content)
    with pytest.raises(ConfigError) as refusal:
        read_config(path)
    assert why in str(refusal.value)
    assert str(path) in str(refusal.value)


def test_a_file_that_is_not_there(tmp_path):
    for path in (tmp_path / "nothing.json", tmp_path):
        with pytest.raises(ConfigError, match=str(path)):
            read_config(path)
