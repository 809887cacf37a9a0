"""The report, from folders written by hand to a page in a real browser."""

import base64
import fcntl
import json
import os
import re
import select
import shutil
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from handmade import line, stage
from PIL import Image

from promptfed.api import Result
from promptfed.errors import UserError
from promptfed.report import page, page_charts, page_data, page_images
from promptfed.report.command import report

Make = Callable[..., Result]
CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
HOSTILE = '<b>"A" & </script><script>boom()</script>'


def history(
    mean: float, rounds: int = 4, wide: float | None = 0.5, sent: int = 900, **more: Any
) -> list[dict[str, Any]]:
    """Rounds that climb to a mean over three clients."""
    each = [np.array([-0.1, 0.0, 0.1]) + mean * at / rounds for at in range(1, rounds + 1)]
    return [
        line(at, [0, 1, 2], loss=2.0 / at, sent=sent, aggregated=stage(list(np.clip(a, 0.01, 1)), wide), **more)
        for at, a in enumerate(each, 1)
    ]


@pytest.fixture
def comparison(make: Make, tmp_path: Path) -> Path:
    """Three rows, the first with two seeds; its label would break a page that trusts it."""
    common = {"rounds": 4, "eval": {"pooled": "never", "after_local": "none"}}
    for name, seed, lines in (
        ("a-seed0", 0, history(0.6, wide=None)),
        ("a-seed1", 1, history(0.7, wide=None)),
        ("fedavg-seed0", 0, history(0.5)),
        ("local-seed0", 0, history(0.8, wide=None, sent=0)),
    ):
        result = make(name, lines, seed=seed, **common)
        (result.folder / "result.json").write_text(json.dumps({**result.numbers, "seed": seed}))
    slug = re.sub(r"[^a-z0-9]+", "-", HOSTILE.lower()).strip("-")
    for seed in (0, 1):
        (tmp_path / f"a-seed{seed}").rename(tmp_path / f"{slug}-seed{seed}")
    (tmp_path / "table.json").write_text(json.dumps([{"label": HOSTILE}, {"label": "FedAvg"}, {"label": "local"}]))
    return tmp_path


def column(name: str) -> page_data.Column:
    return next(one for one in page_data.COLUMNS if one.key == name)


def shown(*folders: Path) -> str:
    """The page without its libraries."""
    text, _ = page.build(page_data.gather(folders))
    return re.sub(r"<script>.*?</script>", "", text.replace(page._bundle(), ""), flags=re.DOTALL)


# ---- numbers


def test_seeds_are_put_together_and_missing_numbers_say_why(comparison: Path) -> None:
    found = page_data.gather([comparison])
    assert [group.label for group in found.groups] == [HOSTILE, "FedAvg", "local"]
    assert not found.problems
    first, fedavg, _ = found.groups
    local = page_data.cell(first, column("local"), "last")
    assert (local.mean, local.std) == (pytest.approx(0.65), pytest.approx(np.std([0.6, 0.7], ddof=1)))
    assert page_data.cell(fedavg, column("local"), "mean_of_last_10").mean == pytest.approx(0.5 * 10 / 16, abs=0.01)
    wide = page_data.cell(first, column("global"), "last")
    assert wide.mean is None
    assert 'eval.pooled = "never"' in wide.why
    assert 'eval.after_local = "none"' in page_data.cell(first, column("after"), "last").why
    assert "validation" in page_data.cell(first, column("local"), "chosen_on_validation").why
    assert page_data.cell(fedavg, column("bytes"), "last").mean == 600


def test_columns_of_newcomers_and_common_models_are_there_where_some_run_has_them(make: Make) -> None:
    plain = make("plain", history(0.5), rounds=4)
    assert not {"common", "newcomers"} & {c.key for c in page_data.columns(page_data.gather([plain.folder]))}
    more = {"common": stage([0.3, 0.5]), "newcomers_aggregated": stage([0.2])}
    other = make("other", history(0.5, **more), rounds=4, method="fedrod")
    found = page_data.gather([plain.folder, other.folder])
    assert {"common", "common_global", "newcomers"} <= {c.key for c in page_data.columns(found)}
    assert page_data.cell(found.groups[1], column("newcomers"), "last").mean == 0.2
    assert "no common model" in page_data.cell(found.groups[0], column("common"), "last").why


def test_runs_of_one_method_with_other_settings_are_told_apart(make: Make) -> None:
    folders = [
        make("one", history(0.5), rounds=4).folder,
        make("two", history(0.6), rounds=4, seed=1).folder,
        make("three", history(0.7), rounds=4, fraction=0.5).folder,
    ]
    found = page_data.gather([*folders, folders[0]])
    assert [(group.label, len(group.entries)) for group in found.groups] == [("fedavg · one", 2), ("fedavg · three", 1)]


# ---- folders as they are


def test_an_unfinished_run_shows_what_it_has(make: Make, tmp_path: Path) -> None:
    make("m-seed0", history(0.5), rounds=4)
    make("m-seed1", history(0.5)[:2], rounds=4, seed=1)
    make("n-seed0", [line(1, [0])], rounds=4)
    found = page_data.gather([tmp_path])
    assert [group.label for group in found.groups] == ["m", "m (seed 1, 2 of 4 rounds)", "n (1 of 4 rounds)"]
    assert ["not finished" in one for one in found.problems] == [True, True]
    assert "no round has been evaluated yet" in shown(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("config.toml", "rounds = [", "is left out, as it cannot be read"),
        ("partition.json", "{", "is left out, as it cannot be read"),
        ("rounds.jsonl", '{"round": 1}\n', "is left out, as it cannot be read"),
        ("result.json", '{"rounds": 4', "the numbers are taken from rounds.jsonl"),
        ("result.json", '{"rounds": 4, "metrics": {}}', "the numbers are taken from rounds.jsonl"),
    ],
)
def test_a_broken_folder_costs_itself_only(comparison: Path, file: str, content: str, told: str) -> None:
    (comparison / "local-seed0" / file).write_text(content)
    out = comparison / "report.html"
    with pytest.warns(UserWarning, match=told):
        page.write([comparison], out)
    text = out.read_text()
    assert told in text
    assert "FedAvg" in text


def test_lines_behind_a_broken_one_are_missed(comparison: Path) -> None:
    file = comparison / "local-seed0" / "rounds.jsonl"
    first, *_ = file.read_text().splitlines()
    file.write_text(f"{first}\nrubbish\n")
    found = page_data.gather([comparison])
    assert len(found.problems) == 2, "the run counts as unfinished too, by its record"
    assert "readable up to round 1 of 4" in found.problems[0]


def test_folders_without_a_run_are_refused(tmp_path: Path, make: Make) -> None:
    with pytest.raises(UserError, match="is no folder"):
        page_data.gather([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no run and no comparison"):
        page_data.gather([tmp_path / "empty"])
    result = make("a", history(0.5))
    (result.folder / "config.toml").write_text("[")
    with pytest.raises(UserError, match="cannot be read"):
        page_data.gather([result.folder])
    (tmp_path / "file").write_text("")
    (result.folder / "config.toml").unlink()
    with pytest.raises(UserError, match="--out"):
        page.write([result.folder], tmp_path / "file" / "report.html")


# ---- the page


def test_what_the_page_says(comparison: Path, make: Make) -> None:
    lost = make(
        "lost-seed0", [*history(0.3)[:3], line(4, [0, 1], left_out=[1], aggregated=stage([0.1, 0.2, 0.3]))], rounds=4
    )
    analysis = lost.folder / "analysis"
    analysis.mkdir()
    Image.new("RGB", (300, 200), "red").save(analysis / "prompt_drift.png")
    (analysis / "prompt_drift.json").write_text(json.dumps({"title": "Drift <of> prompts", "text": "They drift."}))
    (analysis / "prompt_drift.csv").write_text("round,drift\n1,0.25\n")
    (analysis / "broken.png").write_text("no picture")
    Image.new("RGB", (300, 200), "blue").save(comparison / "partition.png")
    text = shown(comparison)
    assert "<b>&quot;A&quot;" not in text
    assert HOSTILE not in text
    assert "</script><script>boom" not in page.build(page_data.gather([comparison]))[0]
    for told in ("Drift &lt;of&gt; prompts", "They drift.", "0.25", "non-finite loss", "client-1"):
        assert told in text
    assert "broken.png is no picture that can be shown" in text
    assert text.count("<img ") == 2
    assert all('alt="' in one and 'alt=""' not in one for one in re.findall(r"<img [^>]*>", text))
    assert "promptfed run " in text
    assert "[partition]" in text
    fingerprint = json.loads((comparison / "local-seed0" / "partition.json").read_text())["dataset"]["fingerprint"]
    assert fingerprint in text
    assert not re.search(r'(?:src|href)="(?!data:|#)', text)


def test_the_command(comparison: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = comparison / "new" / "page.html"
    report([comparison], out)
    assert out.read_text().startswith("<!doctype html>")
    assert "report:" in capsys.readouterr().out


def test_size_has_a_limit(comparison: Path) -> None:
    random = np.random.default_rng(0)
    analysis = comparison / "local-seed0" / "analysis"
    analysis.mkdir()
    for i in range(6):
        noise = random.integers(0, 255, (700, 500, 3), np.uint8)
        Image.fromarray(noise).save(analysis / f"noise-{i}.png")
    with pytest.warns(UserWarning, match=r"too large with all pictures; not shown: .*noise-5\.png"):
        out = page.write([comparison], comparison / "report.html")
    assert out.stat().st_size < page.LIMIT
    text = out.read_text()
    assert 0 < text.count('src="data:image') < 6
    assert "too large with all pictures" in text


def test_many_clients_rounds_and_methods_stay_small(make: Make, tmp_path: Path) -> None:
    accuracies = list(np.random.default_rng(0).random(500))
    for i in range(12):
        lines = [line(at, [0], aggregated=stage(accuracies if at == 300 else [0.5])) for at in range(1, 301)]
        make(f"m{i}-seed0", lines, clients=0, rounds=300)
    found = page_data.gather([tmp_path])
    charts = [page_charts.clients(found), page_charts.curves(found)[0]]
    assert all(chart and len(json.dumps(chart.spec)) < 250_000 for chart in charts)
    rows = next(iter(charts[1].spec["datasets"].values())) if charts[1] else []
    assert {1, 300} <= {row["round"] for row in rows}


def test_thin_keeps_both_ends() -> None:
    assert page_data.thin(range(5), 9) == [0, 1, 2, 3, 4]
    some = page_data.thin(range(1000), 7)
    assert (len(some), some[0], some[-1]) == (7, 0, 999)


def test_ranges() -> None:
    assert page._ranges([7, 3, 5, 6]) == "3, 5–7"


def test_pictures_are_shown_once(comparison: Path) -> None:
    for name in ("local-seed0", "fedavg-seed0"):
        Image.new("RGB", (3000, 200), "blue").save(comparison / name / "partition.png")
    drawn, problems = page_images.embed(page_images.find(page_data.gather([comparison])), 10**6)
    assert [(one.picture.kind, one.width) for one in drawn] == [("partition", 1100)]
    assert not problems


# ---- in a browser


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
                ready, _, _ = select.select([self._answers], [], [], 180)
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

    def open(self, path: Path, state: str = "", width: int = 1200, scheme: str = "light") -> None:
        self.events.clear()
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=850, deviceScaleFactor=1, mobile=phone)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=f"{path.as_uri()}#{state}")
        self.drawn()

    def drawn(self) -> None:
        for _ in range(600):
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


def test_the_table_sorts_by_click_key_and_address(browser: Browser, written: Path) -> None:
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
    browser.open(written, "sort=local&way=ascending&rounds=mean_of_last_10")
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
