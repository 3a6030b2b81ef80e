import pytest
import torch

from tests.cli.runs import Runs


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # On models this small threads only wait for each other, long where other tests run beside this one.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Runs(tmp_path)
    torch.set_num_threads(threads)
