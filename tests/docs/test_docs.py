"""What the documentation says is so: snippets run and print what they say, links lead somewhere, generated pages are up to date."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from pathlib import Path

import pytest

import patrickstar
from tests.docs.pages import ROOT, anchors, links, pages, snippets, split
from tests.forked import run_script

ON_A_DEVICE = ROOT / "docs" / "gpu.md"  # tests/cuda/test_page.py runs it
WITH_SNIPPETS = [page for page in pages() if snippets(page.read_text()) and page != ON_A_DEVICE]
GENERATED = (
    "make_reference.py",
    "make_numbers.py",
    "make_tables.py",
    "make_config_table.py",
    "make_real_run.py",
    "make_gpu_page.py",
)


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    return run_script(*command, cwd=cwd, environment={"PYTHONPATH": path})


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_SNIPPETS, ids=name_of)
def test_snippets_run_as_written(page: Path, tmp_path: Path) -> None:
    done = run("tests.docs.run_page", str(page), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_first_program_of_the_readme_warns_of_nothing_and_prints_a_table(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```python\n{snippets((ROOT / 'README.md').read_text())[0].code}\n```\n\n```text\n{TABLE}\n```\n")
    done = run("tests.docs.run_page", str(page), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


TABLE = """\
device ... host ... disk
peak ... 0 B ... MiB ... MiB
fetched ... 0 B ... MiB ... -
offloaded ... 0 B ... MiB ... -
model states ... MiB, ... bytes per parameter: weight ... MiB, exp_avg ... MiB, exp_avg_sq ... MiB
steps ... 3, 3 as planned
last step ... forward ... s, backward ... s, step ... s
parameters ... by use: ... MiB of model states do not fit in ... MiB"""


@pytest.mark.parametrize("page", ["README.md", "docs/guide.md", "docs/troubleshooting.md"])
def test_the_pages_that_teach_have_snippets(page: str) -> None:
    assert ROOT / page in WITH_SNIPPETS


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n", "line 6"),
        ("```python\nprint('a')\n```\n\n```text\nb\n```\n", "but it prints"),
    ],
)
def test_a_page_that_is_wrong_is_found_out(text: str, why: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    done = run("tests.docs.run_page", str(page), cwd=tmp_path)
    assert done.returncode == 1
    assert why in done.stderr


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for line, target in links(page.read_text()):
        file, _, anchor = target.partition("#")
        there = page if not file else (page.parent / file).resolve()
        if not there.exists() or (anchor and anchor not in anchors(there.read_text())):
            dead.append(f"line {line}: {target}")
    assert not dead


def test_every_page_can_be_reached_from_the_first() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / target.partition("#")[0]).resolve() for _, target in links(index.read_text())}
    missing = [name_of(page) for page in pages() if page.parent != ROOT and page != index and page not in linked]
    assert not missing


@pytest.mark.parametrize("script", GENERATED)
def test_generated_pages_are_up_to_date(script: str) -> None:
    done = run(str(ROOT / "docs" / script), "--check")
    assert done.returncode == 0, done.stderr


def test_every_error_has_a_section_on_what_to_do() -> None:
    headings = anchors((ROOT / "docs" / "troubleshooting.md").read_text())
    errors = [name for name in patrickstar.__all__ if name.endswith("Error") and name != "Error"]
    assert errors
    assert not [name for name in errors if name.lower() not in headings]


def test_changes_to_come_have_a_place() -> None:
    assert "unreleased" in anchors((ROOT / "CHANGELOG.md").read_text())


def test_the_picture_draws_on_light_and_on_dark() -> None:
    picture = (ROOT / "docs" / "images" / "how-it-works.svg").read_text()
    assert "prefers-color-scheme: dark" in picture
    assert "docs/images/how-it-works.svg" in (ROOT / "README.md").read_text()
    assert "images/how-it-works.svg" in (ROOT / "docs" / "how-it-works.md").read_text()


def test_no_page_has_a_path_of_one_machine() -> None:
    found = [
        f"{name_of(page)}: {hit[0]}"
        for page in pages()
        for hit in re.finditer(r"(?<![\w.])/(?:home|root|work|tmp|opt)/[\w./-]*", page.read_text())
    ]
    assert not found


# the reader of pages itself


def test_blocks_are_read_with_their_lines() -> None:
    blocks, prose = split("a\n\n```python\nx\ny\n```\n\n```text\nz\n```\nb\n")
    assert [(block.kind, block.line, block.text, block.follows) for block in blocks] == [
        ("python", 4, "x\ny", False),
        ("text", 9, "z", True),
    ]
    assert [line for _, line in prose] == ["a", "", "", "b"]


def test_headings_have_the_names_that_links_use() -> None:
    assert anchors("# What is `new`?\n\n## Two\n\n## Two\n\n```\n# no heading\n```\n") == {
        "what-is-new",
        "two",
        "two-1",
    }


def test_links_in_code_and_into_the_web_are_left_alone() -> None:
    text = '[a](b.md#c) `[x](y)` [w](https://example.org) <img src="p.svg">\n```\n[x](z.md)\n```\n'
    assert list(links(text)) == [(1, "b.md#c"), (1, "p.svg")]


def test_the_glossary_names_classes_where_they_are_and_everybody_in_a_step() -> None:
    source = Path(patrickstar.__file__).parent
    rows = re.findall(r"^\| `(\w+)` \| .* \| `(\S+\.py)` \|$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    assert [row for row in rows if row[0] not in classes_in(source / row[1])] == []
    in_step = {name for path in (source / "step").glob("*.py") for name in classes_in(path) if name[0] != "_"}
    assert in_step - {name for name, _ in rows} == set()


def classes_in(path: Path) -> set[str]:
    text = path.read_text() if path.is_file() else ""
    return {node.name for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
