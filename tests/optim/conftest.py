"""Tests of the optimizer run on one thread: on many small tensors an OpenMP team costs more than it gives."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
