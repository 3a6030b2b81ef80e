"""Plans for machines that pages show: the commands print what stands there."""

from __future__ import annotations

import shlex
from itertools import pairwise

import pytest

from patrickstar.cli.main import main
from tests.docs.pages import ROOT, matches, split

PAGES = ("docs/gpu.md", "docs/guide.md")
COMMAND = "patrickstar plan --machine "


def shown() -> list[tuple[str, str]]:
    """Commands of the pages, and what stands below them."""
    blocks = [block for page in PAGES for block in split((ROOT / page).read_text())[0]]
    return [
        (block.text, after.text)
        for block, after in pairwise(blocks)
        if block.text.startswith(COMMAND) and after.follows and after.kind == "text"
    ]


def test_pages_show_plans() -> None:
    assert [command.split()[3] for command, _ in shown()] == ["gpu-24g", "h200", "h200"]


@pytest.mark.campaign
@pytest.mark.parametrize(("command", "output"), shown(), ids=[command.split()[5] for command, _ in shown()])
def test_a_plan_that_a_page_shows_is_printed(
    command: str, output: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(command)[1:]) == 0
    assert matches(output, capsys.readouterr().out)
