"""What loading and exporting take of memory beside the model and the budget: a tensor and two blocks, however large the model is."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
from pathlib import Path
import safetensors.torch, torch
from torch import nn
import patrickstar

def high_water():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10

def reset():
    Path("/proc/self/clear_refs").write_text("5")
    return high_water()

directory = Path(sys.argv[1])
torch.set_num_threads(1)
build = lambda width: nn.Sequential(*(nn.Linear(width, width) for _ in range(32)))
for width in (32, 1024):  # the small one first: imports and threads are not what is measured
    model = build(width)
    if sys.argv[2] == "write":
        safetensors.torch.save_file(model.state_dict(), directory / f"{width}")
        continue
    before = reset()
    session = patrickstar.manage(model, weights=directory / f"{width}", precision="fp32", host_memory="24MiB", disk=directory / "disk")
    loaded = high_water() - before
    before = reset()
    session.export(directory / "out")
    exported = high_water() - before
    session.close(keep_weights=False)
if sys.argv[2] == "measure":
    print(loaded, exported)
"""


def test_128_mib_of_weights_pass_through_a_few(tmp_path):
    for what in ("write", "measure"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path), what],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
    loaded, exported = map(int, done.stdout.split())
    # A weight of 4 MiB, two blocks of 4 MiB, and the allocator's own. The model's values stay until all is loaded: chunks make room.
    assert loaded < 32 << 20, done.stdout
    assert exported < 24 << 20, done.stdout
