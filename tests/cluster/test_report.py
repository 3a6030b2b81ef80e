"""The page of a simulation: it parses, asks nobody for anything, and shows what happened."""

import re
from html.parser import HTMLParser

import pytest

from patrickstar.cli.main import main
from patrickstar.cluster.figures import figures, timeline
from patrickstar.cluster.job_view import Cluster
from patrickstar.cluster.policies.catalogue import POLICIES
from patrickstar.cluster.report import page
from patrickstar.cluster.simulation import simulate
from tests.cluster.traces import submission

VOID = {"meta", "br", "link", "img"}


class Parsed(HTMLParser):
    """Tags in order, texts of titles, and whether all that is opened is closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.titles, self.links = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href", "action", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "title":
            self.titles.append(data)


@pytest.fixture(scope="module")
def outcomes():
    jobs = [submission("<b>&a", 0.0, 2, 100.0, noise=4.0, grow=4.0), submission("c", 20.0, 8, 50.0, max_gpus=8)]
    return {name: simulate(jobs, POLICIES[name].decide, cluster=Cluster(gpus=8)) for name in ("fifo", "soonest")}


def test_the_page_parses_and_refers_to_nothing(outcomes):
    text = page(outcomes, [figures(one, policy=name, seed=0) for name, one in outcomes.items()])
    parsed = Parsed(text)
    assert parsed.links == []
    assert not re.search(r"https?:|//|url\(|@import|<script", text)
    assert "Simulated" in text


def test_every_hold_of_gpus_is_a_bar_with_its_size_and_reason(outcomes):
    told = [figures(outcomes["soonest"], policy="soonest", seed=0)]
    titles = Parsed(page({"soonest": outcomes["soonest"]}, told)).titles
    held = [event for event in outcomes["soonest"].events if event["gpus"]]
    bars = [title for title in titles if "GPUs," in title]
    assert len(bars) >= len(held)
    assert any(title.startswith("<b>&a: ") and "ends in" in title for title in bars)


def test_the_timeline_counts_gpus_and_jobs_that_wait(outcomes):
    moments, held, waiting = timeline(outcomes["fifo"])
    # The first runs for 130 s on two GPUs; the second needs all eight, waits from 20 to 130, and runs for 80.
    assert moments.tolist() == [0.0, 20.0, 130.0, 210.0]
    assert held.tolist() == [2, 2, 8, 0]
    assert waiting.tolist() == [0, 1, 0, 0]


def test_a_page_and_a_picture_are_written(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "t.csv").write_text("job,submit,gpus,duration\na,0,2,100\nb,5,1,50\n")
    assert (
        main(["cluster", "simulate", str(tmp_path / "t.csv"), "--policy", "all", "--report", str(tmp_path / "r.html")])
        == 0
    )
    assert (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"
    Parsed((tmp_path / "r.html").read_text())
