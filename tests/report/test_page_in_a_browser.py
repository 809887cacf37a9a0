"""The report in a real browser."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from handmade import HOSTILE, history, line
from PIL import Image

from limits import HANG
from promptfed.report import page
from promptfed.runs.api import Result
from promptfed.runs.rows import Row

Make = Callable[..., Result]
CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)


class Browser:
    """Chromium over the pipe of its DevTools protocol."""

    def __init__(self, profile: Path) -> None:
        ask, self._ask = os.pipe()
        answer, answers = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (ask, answers)]

        def ready() -> None:  # Chromium asks on 3 and answers on 4
            for end, number in zip(ends, (3, 4), strict=True):
                os.dup2(end, number)

        words = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        self._process = subprocess.Popen(
            [*words, f"--user-data-dir={profile}"],
            preexec_fn=ready,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (ask, answers, *ends):
            os.close(end)
        self._answers, self._rest, self._count = answer, b"", 0
        self.events: list[dict[str, Any]] = []
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._ask, data) :]
        while True:
            while b"\0" not in self._rest:
                ready, _, _ = select.select([self._answers], [], [], HANG)
                part = os.read(self._answers, 1 << 16) if ready else b""
                assert part, "the browser is gone, or hangs"
                self._rest += part
            text, self._rest = self._rest.split(b"\0", 1)
            answer = json.loads(text)
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                found: dict[str, Any] = answer["result"]
                return found
            self.events.append(answer)

    def js(self, code: str) -> Any:
        found = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def open(self, path: Path, width: int = 1200, scheme: str = "light") -> None:
        self.events.clear()
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=850, deviceScaleFactor=1, mobile=phone)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=path.as_uri())
        self.drawn()

    def drawn(self) -> None:
        for _ in range(10 * HANG):
            found = self.js("document.documentElement?.dataset.charts")
            if found in ("drawn", "failed"):
                assert found == "drawn", self.complaints()
                return
            time.sleep(0.1)
        raise AssertionError("no charts")

    def complaints(self) -> list[Any]:
        """All that was said on the console, warnings too."""
        methods = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        return [event["params"] for event in self.events if event.get("method") in methods]

    def loaded(self) -> list[str]:
        asked = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [url for url in asked if not url.startswith(("data:", "about:"))]

    def key(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            code = {"Enter": 13}[key]
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, text="\r")

    def close(self) -> None:
        self._session = ""
        try:
            self.call("Browser.close")
        except (AssertionError, OSError):
            pass
        finally:
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
            os.close(self._ask)
            os.close(self._answers)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not CHROMIUM:
        pytest.skip("Chromium is not installed")
    found = Browser(tmp_path_factory.mktemp("chromium"))
    yield found
    found.close()


@pytest.fixture
def written(comparison: Path) -> Path:
    Image.new("RGB", (900, 300), "blue").save(comparison / "partition.png")
    return page.write([comparison], comparison / "report.html")


LABELS = '[...document.querySelectorAll("table[data-kind=KIND] tbody th")].map((one) => one.textContent)'


def test_in_a_browser_nothing_is_loaded_or_complained_of(browser: Browser, written: Path) -> None:
    browser.open(written)
    assert browser.complaints() == []
    assert browser.loaded() == [written.as_uri()]
    charts = browser.js(
        '[...document.querySelectorAll(".chart")].map((one) => one.querySelectorAll("svg path").length)'
    )
    assert len(charts) == 4
    assert all(count > 3 for count in charts)
    assert browser.js("window.boom === undefined && !document.querySelector('td b, th b')")
    names = browser.js('[...document.querySelectorAll(".chart svg")].map((one) => one.getAttribute("aria-label"))')
    assert all(names)


def test_the_table_sorts_by_click_and_key(browser: Browser, written: Path) -> None:
    browser.open(written)
    labels = LABELS.replace("KIND", "last")
    assert browser.js(labels) == ["local", HOSTILE, "FedAvg"], "best first"
    head = 'document.querySelector("table[data-kind=last] th[data-key=global]")'
    browser.js(f"{head}.querySelector('button').click()")
    assert browser.js(labels)[0] == "FedAvg", "what is missing is last"
    assert browser.js(f"{head}.getAttribute('aria-sort')") == "descending"
    browser.js('document.querySelector("table[data-kind=last] th[data-key=label] button").focus()')
    browser.key("Enter")
    assert browser.js(labels) == sorted([HOSTILE, "FedAvg", "local"], key=str.lower)
    browser.js('document.querySelector("input[value=mean_of_last_10]").click()')
    browser.js('document.querySelector("table[data-kind=mean_of_last_10] th[data-key=local] button").click()')
    browser.js('document.querySelector("table[data-kind=mean_of_last_10] th[data-key=local] button").click()')
    assert browser.js(LABELS.replace("KIND", "mean_of_last_10")) == ["FedAvg", HOSTILE, "local"]
    assert browser.js(
        '[...document.querySelectorAll("[data-rounds]:not([hidden])")].map((one) => one.dataset.rounds)'
    ) == ["mean_of_last_10"]
    assert browser.js('document.querySelector("input[value=chosen_on_validation]").disabled'), "nobody has such data"


def test_charts_follow_the_legend_the_measure_and_the_pointer(browser: Browser, written: Path) -> None:
    browser.open(written)
    marks = 'document.querySelectorAll("#chart-curves svg .mark-symbol path").length'
    before = browser.js(marks)
    browser.js("document.querySelector('.legend button[data-label=FedAvg]').click()")
    settle = "new Promise((done) => setTimeout(done, 400))"
    browser.js(settle)
    assert 0 < browser.js(marks) < before
    axis = 'document.querySelector("#chart-curves svg .role-axis-label, #chart-curves svg").textContent'
    local = browser.js(axis)
    browser.js("document.querySelector('input[value=loss]').click()")
    browser.js(settle)
    assert browser.js(axis) != local
    assert browser.js('document.getElementById("measure-title").textContent') == "Training loss"
    place = browser.js(
        '(() => { const one = document.querySelector("#chart-clients svg .mark-symbol path"); '
        'one.scrollIntoView({block: "center", behavior: "instant"}); const box = one.getBoundingClientRect(); '
        "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
    )
    for nudge in (3, 0):
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=place[0] + nudge, y=place[1])
    browser.js(settle)
    assert "client-" in (browser.js('document.querySelector("#vg-tooltip-element")?.textContent') or "")
    assert browser.complaints() == []


def test_on_a_phone_the_page_is_as_wide_as_the_screen(browser: Browser, written: Path) -> None:
    browser.open(written, width=390)
    assert browser.js("document.documentElement.scrollWidth") == 390
    assert browser.js("window.innerWidth") == 390
    wide = '[...document.querySelectorAll(".chart svg")].every((one) => one.getBoundingClientRect().right <= 390)'
    assert browser.js(wide)
    assert browser.js(
        '(() => { const one = document.querySelector(".scroll"); return one.scrollWidth > one.clientWidth; })()'
    )


def test_light_and_dark(browser: Browser, written: Path) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    browser.open(written)
    light = browser.js(ground)
    colours = 'document.querySelector("#chart-curves").innerHTML.toLowerCase()'
    assert "#0072b2" in browser.js(colours)
    browser.js('document.getElementById("theme").click()')
    browser.drawn()
    dark = browser.js(ground)
    assert dark != light
    browser.js("localStorage.clear()")
    browser.open(written, scheme="dark")
    assert browser.js(ground) == dark
    assert "#0072b2" not in browser.js(colours)
    picture = browser.call("Page.captureScreenshot")["data"]
    assert len(base64.b64decode(picture)) > 10_000


def test_a_single_run_and_an_empty_one_are_pages_too(browser: Browser, make: Make, tmp_path: Path) -> None:
    for name, lines in (("one", history(0.5)), ("none", []), ("begun", [line(1, [0])])):
        folder = make(name, lines, rounds=4).folder
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = page.write([folder], tmp_path / f"{name}.html")
        browser.open(out)
        assert browser.complaints() == []


@pytest.mark.parametrize("width", [390, 1200])
def test_long_labels_are_whole_and_in_place(browser: Browser, make: Make, tmp_path: Path, width: int) -> None:
    labels = [f"with q_g and momentum, on everything, CIFAR-100, s={size}" for size in (50, 10)]
    for label in labels:
        make(f"{Row(label, {}, ()).slug}-seed0", history(0.5), rounds=4)
    (tmp_path / "table.json").write_text(json.dumps([{"label": label} for label in labels]))
    browser.open(page.write([tmp_path], tmp_path / "report.html"), width=width)
    axis = browser.js('document.querySelector("#chart-clients svg").textContent')
    assert "…" not in axis
    assert "s=50" in axis
    assert "s=10" in axis
    assert browser.js(
        '[...document.querySelectorAll("table[data-kind=last] tbody th")].every((one) => '
        'getComputedStyle(one).textOverflow !== "ellipsis" && one.scrollWidth <= one.clientWidth + 1)'
    )
    assert browser.complaints() == []
