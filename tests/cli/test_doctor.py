import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from patrickstar.cli import doctor as module
from patrickstar.cli.main import main
from patrickstar.memory.allocator import allocator
from tests.faults import Fails, FaultyIO


@pytest.fixture
def report(capsys):
    def call(*arguments, status=0):
        assert main(["doctor", *arguments]) == status
        return capsys.readouterr().out

    return call


def test_it_says_what_this_machine_has_as_a_line_a_finding_or_for_programs(report):
    found = json.loads(report("--json"))
    assert found["torch"].startswith("2.")
    assert found["threads"]["cores"] >= found["threads"]["torch"] >= 1
    assert found["memory"]["total"] >= found["memory"]["available"] > 0
    assert {"instructions", "optimizer kernel", "allocator", "cuda", "lockable memory"} <= set(found)
    assert "disk" not in found
    assert {"python", "torch", "allocator"} <= {line.split()[0] for line in report().splitlines()}


def test_a_directory_is_tried_out_and_left_as_it_was(report, tmp_path):
    found = json.loads(report("--json", "--disk", str(tmp_path)))
    assert found["disk"]["free"] > 0
    assert isinstance(found["disk"]["direct_io"], bool)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "fails", "says"),
    [
        ("a/b", None, "disk='{}': "),
        ("file", None, "{}: cannot be a disk tier"),
        (".", errno.EACCES, "{}: cannot be a disk tier"),
        (".", errno.EACCES, "Permission denied; change its owner or its mode"),
    ],
)
def test_what_can_be_no_disk_tier_is_a_fault_with_what_mends_it(report, tmp_path, monkeypatch, name, fails, says):
    place = tmp_path / "home"
    place.mkdir()
    (place / "file").touch()
    if fails:
        monkeypatch.setattr("patrickstar.memory.disk.FileIO", lambda: FaultyIO(Fails("open", fails)))
    assert says.format(place / name) in report("--disk", str(place / name), status=1)
    assert json.loads(report("--json", "--disk", str(place / name), status=1))["faults"] == ["disk"]
    assert [file.name for file in place.iterdir()] == ["file"]


BROKEN = {
    "torchvision": ("operator torchvision::nms does not exist", "it does not belong to torch 2."),
    "tokenizers": ("undefined symbol", "pip install --force-reinstall tokenizers"),
}


@pytest.mark.parametrize("package", ["torchvision", pytest.param("tokenizers", marks=pytest.mark.campaign)])
def test_a_package_that_cannot_be_imported_is_named_with_what_mends_it(tmp_path, package):
    says, mends = BROKEN[package]
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(f"raise RuntimeError({says!r})")
    # A process that has imported neither: those that tests fork have.
    command = [sys.executable, "-m", "patrickstar", "doctor"]
    known = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))}
    shown = subprocess.run(command, env=known, capture_output=True, text=True, check=False)
    assert shown.returncode == 1, shown.stderr
    assert f"cannot be imported: RuntimeError: {says}" in shown.stdout
    assert mends in shown.stdout
    assert "Traceback" not in shown.stderr


def test_without_tcmalloc_the_command_that_installs_it_is_named(report, monkeypatch):
    glibc = replace(allocator(), name="glibc")
    monkeypatch.setattr("patrickstar.memory.allocator.allocator", lambda: glibc)
    monkeypatch.setattr("patrickstar.memory.allocator.tcmalloc_library", lambda: None)
    assert "apt install libtcmalloc-minimal4" in report()
    monkeypatch.setattr("patrickstar.memory.allocator.tcmalloc_library", lambda: Path("/lib/libtcmalloc.so"))
    text = report()
    assert "apt install" not in text
    assert "LD_PRELOAD=/lib/libtcmalloc.so" in text


def test_a_file_system_without_direct_io_is_said_to_be_one(tmp_path, monkeypatch):
    def refuse(io, fd):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(module.FileIO, "set_direct", refuse)
    (found,) = module._disk(tmp_path)
    assert found.value["direct_io"] is False
    assert "page cache" in found.advice
    assert list(tmp_path.iterdir()) == []
