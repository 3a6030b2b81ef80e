"""The page of a simulation in a real browser: it is laid out, answers to the pointer, and asks nobody for anything."""

import json
import shutil

import pytest

from patrickstar.cluster.figures import figures
from patrickstar.cluster.job_view import Cluster
from patrickstar.cluster.policies.catalogue import POLICIES
from patrickstar.cluster.report import page
from patrickstar.cluster.simulation import simulate
from tests.cluster.traces import submission

pytestmark = pytest.mark.campaign
webdriver = pytest.importorskip("selenium.webdriver")
BOXES = """return [...document.querySelectorAll(arguments[0])].filter(one => one.checkVisibility())
    .map(one => one.getBoundingClientRect()).map(box => [box.width, box.height])"""


@pytest.fixture
def browser():
    if not shutil.which("chromium") or not shutil.which("chromedriver"):
        pytest.skip("needs a browser: apt install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in ("--headless", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,900"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    yield found
    found.quit()


def test_the_page_is_shown_and_asks_nobody(browser, tmp_path):
    jobs = [submission("<b>&a", 0.0, 2, 100.0, noise=4.0, grow=4.0), submission("c", 20.0, 8, 50.0, max_gpus=8)]
    found = {name: simulate(jobs, one.decide, cluster=Cluster(gpus=8)) for name, one in POLICIES.items()}
    path = tmp_path / "r.html"
    path.write_text(page(found, [figures(one, policy=name, seed=0) for name, one in found.items()]), encoding="utf-8")
    browser.get(path.as_uri())

    assert browser.title == "Scheduling"
    rows = browser.find_elements("css selector", "table tr")
    assert [row.text.split()[0] for row in rows[1:]] == [*POLICIES]
    assert len(browser.execute_script(BOXES, "svg polyline")) == len(POLICIES)
    assert browser.execute_script(BOXES, "details rect") == []
    for summary in browser.find_elements("css selector", "summary"):
        summary.click()
    assert len(browser.execute_script(BOXES, "svg polyline")) == len(POLICIES) * 3
    bars = browser.execute_script(BOXES, "details rect")
    assert bars
    assert all(width > 1 and height > 1 for width, height in bars)
    titles = [bar.get_attribute("textContent") for bar in browser.find_elements("css selector", "rect > title")]
    assert any(title.startswith("<b>&a: 2 GPUs, ") for title in titles)
    wide = browser.execute_script("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0

    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert asked == [path.as_uri()]
    assert browser.get_log("browser") == []
