"""JOBS.yaml: jobs that are to share GPUs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from patrickstar.errors import ConfigError, nearest

_NAME: Final = re.compile(r"\w[\w.-]*")
_LEAST: Final = (("gpus", 1), ("min", 1), ("max", 1), ("steps", 1), ("submit", 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedJob:
    """One job, by the keys of the file. `max` is `min` where it is not given; None for `steps`: not known."""

    name: str
    run: str
    min: int = 1
    max: int = 0
    steps: int | None = None
    submit: float = 0.0
    user: str = ""
    priority: int = 0
    pinned: bool = False


def read_jobs(
    path: Path, *, gpus: int | None = None, otherwise: int | None = None
) -> tuple[int, tuple[SharedJob, ...]]:
    """The number of GPUs, the file's own where `gpus` is None, else `otherwise`, and the jobs in the order of the file.

    Raises:
        ConfigError: what is wrong there; names file, line and column. Or PyYAML is not there.
    """
    try:
        import yaml  # noqa: PLC0415  (an extra)
    except ImportError:
        raise ConfigError("JOBS.yaml needs PyYAML: pip install 'patrickstar[cluster]'") from None
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    except yaml.YAMLError as error:
        mark, what = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        raise ConfigError(f"{path}: {_place(mark) if mark else ''}{what or error}") from None
    if root is None:
        raise ConfigError(f"{path}: nothing there; `jobs:` is expected")
    return _JobsReader(path, yaml.SafeLoader("")).jobs(root, gpus, otherwise)


def _place(mark: Any) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}: "


@dataclass(frozen=True, slots=True)
class _JobsReader:
    path: Path
    loader: Any

    def error(self, node: Any, what: str) -> ConfigError:
        return ConfigError(f"{self.path}: {_place(node.start_mark)}{what}")

    def entries(self, node: Any, known: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        """Keys of a mapping with the nodes of their values."""
        if node.id != "mapping":
            raise self.error(node, f"keys are expected here, such as `{known[0]}:`")
        seen = set()
        for key, value in node.value:
            if key.value not in known:
                raise self.error(key, f"unknown key {key.value!r}{nearest(str(key.value), known)}")
            if key.value in seen:
                raise self.error(key, f"{key.value!r} is there twice")
            seen.add(key.value)
            yield key.value, value

    def value(self, key: str, node: Any, kind: str) -> Any:
        try:
            found: Any = self.loader.construct_object(node, deep=True)
        except Exception as error:  # of YAML, or of what makes a value of its text
            raise self.error(node, f"{key}: {getattr(error, 'problem', error)}") from None
        allowed: Any = (int, float) if "float" in kind else {"str": str, "bool": bool}.get(kind, int)
        if not isinstance(found, allowed) or (isinstance(found, bool) and kind != "bool"):
            words = {"str": "a text is expected, in quotes where it looks like a number", "bool": "true or false"}
            raise self.error(node, f"{key}: {found!r}; {words.get(kind, 'a number is expected')}")
        least = dict(_LEAST).get(key)
        if least is not None and not least <= found < float("inf"):
            raise self.error(node, f"{key}: {found} is less than {least} or without end")
        return found

    def jobs(self, root: Any, gpus: int | None, otherwise: int | None) -> tuple[int, tuple[SharedJob, ...]]:
        top = dict(self.entries(root, ("gpus", "jobs")))
        own = self.value("gpus", top["gpus"], "int") if "gpus" in top else None
        if (gpus := gpus or own or otherwise) is None:
            raise self.error(root, "`gpus:` is missing, the GPUs of this machine or its slots; or give --gpus")
        if "jobs" not in top or top["jobs"].id != "sequence" or not top["jobs"].value:
            raise self.error(top.get("jobs", root), "`jobs:` is to be a list of jobs, each beginning with `- name:`")
        found: dict[str, SharedJob] = {}
        for node in top["jobs"].value:
            job = self.job(node, gpus)
            if job.name in found:
                raise self.error(node, f"a second job {job.name!r}: each needs a name of its own")
            found[job.name] = job
        return gpus, tuple(found.values())

    def job(self, node: Any, gpus: int) -> SharedJob:
        kinds = {field.name: str(field.type) for field in fields(SharedJob)}
        nodes = dict(self.entries(node, tuple(kinds)))
        for key in ("name", "run"):
            if key not in nodes:
                raise self.error(node, f"a job without `{key}:`")
        given = {key: self.value(key, value, kinds[key]) for key, value in nodes.items()}
        least, name = given.get("min", 1), given["name"]
        most = given.get("max", least)
        if not _NAME.fullmatch(name):
            raise self.error(nodes["name"], f"name: {name!r} has other signs than letters, digits, '.', '_', '-'")
        if least > gpus:
            raise self.error(nodes["min"], f"min: {least} GPUs, more than the {gpus} that there are")
        if least > most:
            raise self.error(nodes["max"], f"max: {most} is less than min, {least}")
        try:
            if not shlex.split(given["run"]):
                raise ValueError("nothing to run")  # noqa: TRY301  (told as what the other call raises)
        except ValueError as error:
            raise self.error(nodes["run"], f"run: {given['run']!r}: {error}") from None
        return SharedJob(**{**given, "max": min(most, gpus)})
