"""The verb `doctor`: what this machine has for training, what is missing, and the command that mends it."""

from __future__ import annotations

import importlib
import json
import os
import platform
import resource
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import click

from patrickstar.cli.flags import debug_option, path
from patrickstar.cli.machines import MachinePreset, write_machine
from patrickstar.errors import DeviceError
from patrickstar.memory.disk import expect_usable, free_bytes
from patrickstar.memory.fileio import FileIO
from patrickstar.units import format_bytes

# Of a package, the module that the verbs use; importing transformers itself imports next to nothing.
_IMPORTED: Final = MappingProxyType({"rich": "rich.progress", "transformers": "transformers.models.gpt2.modeling_gpt2"})


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing about this machine: as text for people, as a value for programs, and what would help."""

    name: str
    text: str
    value: Any
    advice: str = ""
    fault: bool = False
    """Whether a verb, or what was asked about, cannot work like this."""


@click.command()
@click.option(
    "--disk", type=click.Path(path_type=Path), metavar="DIR", help="Directory of the disk tier, to be tried out."
)
@path(
    "--measure",
    "FILE",
    says="Write this machine's figures into a file that `plan --machine FILE` reads elsewhere. Speeds are not measured yet.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
@debug_option
def doctor(disk: Path | None, measure: Path | None, as_json: bool) -> int:
    """Say what this machine has, what is missing, and the command that mends it."""
    findings = list(examine(disk))
    if measure is not None:
        write_machine(_figures(disk), measure)
        where = f"{measure}: memory and types, for `patrickstar plan --machine {measure}`; speeds are not measured yet"
        findings.append(Finding("machine", where, str(measure)))
    faults = [found.name for found in findings if found.fault]
    if as_json:
        row = {found.name: found.value for found in findings}
        advice = {found.name: found.advice for found in findings if found.advice}
        click.echo(json.dumps({**row, "advice": advice, "faults": faults}))
    else:
        width = max(len(found.name) for found in findings)
        for found in findings:
            click.echo(f"{found.name:{width}}  {found.text}")
            if found.advice:
                click.echo(f"{'':{width}}  -> {found.advice}")
    return 1 if faults else 0


def examine(disk: Path | None) -> Iterator[Finding]:
    """Everything worth knowing, in the order in which it matters."""
    yield Finding("python", platform.python_version(), platform.python_version())
    vision = () if find_spec("torchvision") is None else ("torchvision",)
    packages = [_package(name) for name in ("torch", "safetensors", "rich", "tokenizers", *vision, "transformers")]
    yield from packages
    if packages[0].fault:
        return  # all else is asked of torch
    for part in (_processor, _memory, _allocator, _cuda):
        yield from part()
    if disk is not None:
        yield from _disk(disk)


def _package(name: str) -> Finding:
    """A package that the verbs need, imported as they do, or that transformers imports where it finds it."""
    try:
        found = version(name)
    except PackageNotFoundError:
        found = "of unknown version"
    try:
        importlib.import_module(_IMPORTED.get(name, name))
    except Exception as error:  # a package that is not whole may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            advice = "pip install 'patrickstar[train]': the command line trains with it"
            return Finding(name, "not installed", None, advice, fault=True)
        advice = f"pip install --force-reinstall {name}, in a version that belongs to what is installed beside it"
        if name == "torchvision":
            advice = (
                f"it does not belong to torch {version('torch')}, and transformers imports it where it finds it: install the version that does, "
                "or pip uninstall torchvision"
            )
        says = next(iter(str(error).splitlines()), "")
        text = f"{found}, cannot be imported: {type(error).__name__}: {says}"
        return Finding(name, text, None, advice, fault=True)
    return Finding(name, found, found)


def _processor() -> Iterator[Finding]:
    import torch

    from patrickstar.optim.choose import choose_kernel

    yield Finding("system", f"{platform.system()} {platform.release()} {platform.machine()}", platform.machine())
    cores = len(os.sched_getaffinity(0))
    threads = torch.get_num_threads()
    advice = f"OMP_NUM_THREADS={cores} would use them all" if threads < cores else ""
    yield Finding("threads", f"{threads} of {cores} cores", {"torch": threads, "cores": cores}, advice)
    isa = torch.backends.cpu.get_cpu_capability()
    yield Finding("instructions", isa, isa)
    try:
        choose_kernel()
        yield Finding("optimizer kernel", "torch", "torch")
    except DeviceError as error:
        yield Finding("optimizer kernel", "none", None, str(error))


def _memory() -> Iterator[Finding]:
    from patrickstar.memory.process import available_bytes, memory_groups, total_bytes

    total, available = total_bytes(), available_bytes()
    text = f"{format_bytes(total)}, {format_bytes(available)} available"
    yield Finding("memory", text, {"total": total, "available": available})
    limit = min((group.limit_bytes for group in memory_groups()), default=None)
    yield Finding("control group's limit", "none" if limit is None else format_bytes(limit), limit)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked = None if soft == resource.RLIM_INFINITY else soft
    # Nothing here pins memory without a GPU, so a small limit is no fault yet.
    yield Finding("lockable memory", "unlimited" if locked is None else format_bytes(locked), locked)


def _allocator() -> Iterator[Finding]:
    from patrickstar.memory.allocator import allocator, tcmalloc_library

    found, library = allocator(), tcmalloc_library()
    advice = ""
    if found.name == "glibc" and library is None:
        advice = (
            "glibc keeps freed activations, which count against host_memory: where a plan has no room for them, a session makes it return "
            "them at once, and steps take longer by that; tcmalloc returns them for less, and `patrickstar train` starts itself under it where it "
            "finds it: apt install libtcmalloc-minimal4 (elsewhere: gperftools)"
        )
    elif found.name == "glibc":
        advice = f"LD_PRELOAD={library} returns freed memory for less time; `patrickstar train` starts itself with it"
    elif found.name not in ("glibc", "tcmalloc"):
        advice = (
            f"a session cannot make {found.name} return freed memory at once: a step needs more host_memory than under "
            "glibc or tcmalloc; leave LD_PRELOAD out, or preload tcmalloc"
        )
    value = {"name": found.name, "library": found.library, "tcmalloc": None if library is None else str(library)}
    yield Finding("allocator", found.name, value, advice)


def _cuda() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        yield Finding("cuda", "none", [])
        return
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    text = ", ".join(f"{device.name} ({format_bytes(device.total_memory)})" for device in devices)
    yield Finding("cuda", text, [{"name": device.name, "bytes": device.total_memory} for device in devices])


def _figures(disk: Path | None) -> MachinePreset:
    """The figures of this machine, its GPUs all like the first. `disk`: where the disk tier would be."""
    import torch

    from patrickstar.step.resources import Resources

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    has = Resources.of_this_machine("cuda:0" if gpus else "cpu")
    return MachinePreset(
        device=torch.cuda.get_device_name(0) if gpus else "",
        devices=gpus,
        device_bytes=has.device_total_bytes,
        context_bytes=has.device_total_bytes - has.device_free_bytes,
        workspace_percent=has.workspace_percent,
        host_bytes=has.host_total_bytes,
        disk_bytes=0 if disk is None else free_bytes(disk),
        fast_16bit=tuple(sorted(has.fast_types)),
        threads=has.threads,
    )


def _disk(directory: Path) -> Iterator[Finding]:
    """Tells whether the directory can be a disk tier, and whether its file system moves bytes past the page cache."""
    try:
        expect_usable(directory)
        free = free_bytes(directory)
    except DeviceError as error:
        yield Finding("disk", f"{directory}: cannot be a disk tier", None, str(error), fault=True)
        return
    direct, advice = "works", ""
    try:
        with tempfile.TemporaryFile(dir=directory if directory.is_dir() else directory.parent) as file:
            FileIO().set_direct(file.fileno())
    except OSError as error:
        direct = f"does not work ({error.strerror})"
        advice = "transfers will go through the page cache; a directory on ext4 or xfs is faster"
    value = {"directory": str(directory), "free": free, "direct_io": not advice}
    yield Finding("disk", f"{directory}: {format_bytes(free)} free, direct I/O {direct}", value, advice)
