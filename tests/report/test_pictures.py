import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from handmade import line, stage
from PIL import Image

from promptfed.clients.store import Store
from promptfed.errors import UserError
from promptfed.report import charts, draw_comparison, draw_run, prompts, run_charts, style
from promptfed.report.gather import Group, ReportData, read
from promptfed.report.numbers import thin
from promptfed.runs import config as C
from promptfed.runs.api import Result, run
from promptfed.runs.build import assemble
from promptfed.runs.opened import Run

Make = Callable[..., Result]


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    """A warning is a failure."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def check(paths: list[Path], *names: str) -> None:
    """These pictures were made, and can be looked at."""
    assert [path.name for path in paths] == list(names)
    for path in paths:
        with Image.open(path) as image:
            image.load()
            assert image.format == "PNG"
            assert 700 <= image.width <= 1600
            assert 300 <= image.height <= 1600
            assert len(image.convert("RGB").resize((60, 60)).getcolors(3600) or []) > 3


def rows(chart: style.Chart | None) -> list[dict[str, Any]]:
    """All that a chart has data of."""
    assert chart
    return [row for part in chart.to_dict()["datasets"].values() for row in part]


def series(chart: style.Chart | None, of: str = "value") -> dict[str, tuple[list[float], list[float]]]:
    """Label -> rounds and values of a line."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for row in rows(chart):
        if "label" in row and of in row:
            at, values = found.setdefault(row["label"], ([], []))
            at.append(row["round"])
            values.append(row[of])
    return found


def texts(node: Any, key: str) -> list[Any]:
    """All values of this key in a specification, from the first to the last."""
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    own = [node[key]] if isinstance(node, dict) and key in node else []
    return own + [text for one in inner for text in texts(one, key)]


# ---- one run


def some_rounds() -> list[dict[str, object]]:
    """Four rounds of two of three clients, every second one evaluated; client 1 has no test data."""
    return [
        line(1, [0, 1], loss=2.0),
        line(
            2, [0, 2], loss=1.5, aggregated=stage([0.2, None, 0.4], 0.25), after_local=stage([0.5, 0.7], None, [0, 2])
        ),
        line(3, [0, 1], left_out=[0, 1], loss=None),
        line(
            4,
            [1, 2],
            loss=1.0,
            aggregated=stage([0.4, None, 0.8], 0.35),
            after_local=stage([0.5, 0.6], None, [1, 2]),
            after_local_all=stage([0.6, None, 0.9], 0.2),
        ),
    ]


def test_curves_show_what_is_on_record(make: Make) -> None:
    lines = series(run_charts.curves(Run(make("a", some_rounds()).folder)))
    assert lines["local"] == ([2, 4], pytest.approx([30, 60]))
    assert lines["worst client"] == ([2, 4], pytest.approx([20, 40]))
    assert lines["global"] == ([2, 4], [25, 35])
    # the scores of all clients at the end are no point of the line of participants
    assert lines["after local"] == ([2, 4], pytest.approx([60, 55]))
    assert lines["loss"] == ([1, 2, 4], [2.0, 1.5, 1.0])


def test_names_are_cut_where_they_stay_apart() -> None:
    names = ["short", "a name that is rather long", "hospital of the city, north", "hospital of the city, south"]
    assert style.short(names, 18) == ["short", "a name that is ra…", "hospital…ty, north", "hospital…ty, south"]
    twins = ["x" * 30 + "1" + "y" * 30, "x" * 30 + "2" + "y" * 30]
    assert style.short(twins, 18) == twins


def test_hundreds_of_clients_have_numbers_in_place_of_names(make: Make) -> None:
    chart = run_charts.samples(Run(make("a", [], clients=60).folder).shares)
    assert len(rows(chart)) == 3 * 60
    assert [0, 10, 20, 30, 40, 50] in texts(chart.to_dict(), "values")  # type: ignore[union-attr]


def test_pictures_of_a_run(make: Make) -> None:
    folder = make("a", some_rounds()).folder
    check(draw_run(folder), "curves.png", "partition.png")
    assert not list(folder.glob("*.part"))


@pytest.mark.parametrize("clients", [1, 4, 41, 500])
def test_any_number_of_clients(make: Make, clients: int) -> None:
    accuracies = np.random.default_rng(0).random(clients).tolist()
    folder = make("a", [line(1, range(clients), aggregated=stage(accuracies))], clients=clients).folder
    check(draw_run(folder), "curves.png", "partition.png")


def test_a_run_that_goes_on_is_drawn_as_far_as_it_is(make: Make) -> None:
    check(draw_run(make("begun", []).folder), "partition.png")
    check(draw_run(make("unscored", [line(1, [0])]).folder), "curves.png", "partition.png")
    cut = make("cut", some_rounds()).folder
    with (cut / "rounds.jsonl").open("a") as file:
        file.write('{"round": 5, "cli')
    check(draw_run(cut), "curves.png", "partition.png")


@pytest.mark.parametrize(
    "scores",
    [
        stage([None, None, None], None),  # nobody has test data
        stage([0.5, 0.5, 0.5], None),  # no global accuracy, no breadth
        stage([0.0, 0.0, 0.0], 0.0),
        stage([1.0, 1.0, 1.0], 1.0),
    ],
)
def test_a_single_round(make: Make, scores: dict[str, object]) -> None:
    folder = make("a", [line(1, [0, 1, 2], aggregated=scores, after_local=scores)]).folder
    assert "curves.png" in [path.name for path in draw_run(folder)]


def test_a_folder_without_partition(make: Make) -> None:
    check(draw_run(make("a", some_rounds(), clients=0).folder), "curves.png")


def test_a_dataset_that_is_gone_costs_the_pictures_that_need_it(make: Make) -> None:
    folder = make("a", some_rounds()).folder
    file = folder / "config.toml"
    file.write_text(file.read_text().replace("limit = 120", "limit = 100"))
    with pytest.warns(UserWarning, match="no picture of the partition and the prompts: .* another dataset"):
        check(draw_run(folder), "curves.png")


def test_words_are_taken_as_they_stand(make: Make) -> None:
    folder = make("a", some_rounds()).folder
    split = folder / "partition.json"
    split.write_text(split.read_text().replace('"client-0"', '"$a_b\\"]"').replace('"client-1"', r'"_x$y\\frac$"'))
    run = Run(folder)
    assert run.name(0) == '$a_b"]'
    chart = run_charts.samples(run.shares)
    assert chart
    style.save(chart, folder / "a.png")


# ---- prompts


@pytest.mark.parametrize("template", ["padding", "fixed-patch", "random-patch"])
def test_prompts_are_read_from_the_store(make: Make, template: str) -> None:
    lines = [line(1, [0, 1], left_out=[1]), line(2, [2])]
    folder = make("a", lines, method={"name": "pfedpt", "prompt": template, "prompt_size": 2}).folder
    tuning = prompts.pixel_prompt(Run(folder))
    assert tuning
    parts = assemble(C.make(C.read(folder / "config.toml")), partition=folder / "partition.json")
    start = tuning.start(parts.model, 0)
    store = Store(folder / "clients")
    remembered = {f"private/{name}": p + 1 for name, p in start.items()}
    store.put(1, {0: {**remembered, "memory/head.weight": torch.ones(2)}})
    store.put(2, {2: remembered})
    store.put(3, {2: {name: p + 5 for name, p in remembered.items()}})  # a round that was not completed
    store.close()

    found = prompts.read(Run(folder))
    assert found
    assert found.round == 2
    assert list(found.clients) == [0, 2]
    assert found.start.shape == parts.federation.dataset.images.shape[2:] + parts.federation.dataset.images.shape[1:2]
    for image in found.clients.values():
        np.testing.assert_allclose((image - found.start)[found.inside], 1, atol=1e-5)
        assert not image[~found.inside].any()
    figure = prompts.draw(Run(folder), found)
    assert [axes.get_title() for axes in figure.axes if axes.get_title()] == ["at the start", "client 0", "client 2"]
    check(draw_run(folder), "curves.png", "partition.png", "prompts.png")


def test_prompts_of_a_method_that_has_none(make: Make) -> None:
    assert prompts.pixel_prompt(Run(make("plain", []).folder)) is None
    assert prompts.pixel_prompt(Run(make("tokens", [], method="pfedpt-tokens").folder)) is None


def test_at_most_sixteen_prompts_are_shown() -> None:
    image = np.zeros((4, 4, 1))
    few = thin(range(100, 600), prompts.MOST)
    assert len(few) == prompts.MOST
    assert (few[0], few[-1]) == (100, 599)
    run = Run(Path("a"))
    some = prompts.Prompts(7, image, np.ones((4, 4), bool), dict.fromkeys(few, image), 500)
    figure = prompts.draw(run, some)
    assert sum(bool(axes.images) for axes in figure.axes) == 1 + 2 * prompts.MOST
    assert "16 of 500 clients" in figure.get_suptitle()


def test_prompts_of_a_run_that_this_process_is_at_work_on(make: Make) -> None:
    folder = make("a", [line(1, [0])], method="pfedpt").folder
    store = Store(folder / "clients")
    with pytest.warns(UserWarning, match="no picture of the prompts"):
        check(draw_run(folder), "curves.png", "partition.png")
    store.close()


def test_a_real_run(tmp_path: Path) -> None:
    done = run(
        out=tmp_path / "a",
        method={"name": "pfedpt", "epochs": 1, "prompt_epochs": 1},
        dataset={"name": "digits", "limit": 120},
        partition={"name": "dirichlet", "clients": 3},
        rounds=2,
        **{"engine.workers": 1},
    )
    check(draw_run(done.folder), "curves.png", "partition.png", "prompts.png")
    check(
        draw_comparison(tmp_path, {"pFedPT": [done]}),
        "comparison.png",
        "curves.png",
        "communication.png",
        "partition.png",
        "prompts.png",
    )


# ---- a comparison


@pytest.fixture
def results(make: Make) -> dict[str, list[Result]]:
    """FedAvg with two seeds, a better method with one, and one that sends nothing."""

    def rounds(last: float, sent: int, wide: float | None = 0.3) -> list[dict[str, object]]:
        return [
            line(1, [0, 1, 2], sent=sent),
            line(2, [0, 1, 2], sent=sent, aggregated=stage([0.1, 0.2, 0.3], wide)),
            line(3, [0, 1, 2], sent=sent),
            line(4, [0, 1, 2], sent=sent, aggregated=stage([last - 0.1, last, last + 0.1], wide)),
        ]

    return {
        "FedAvg": [
            make("fedavg-0", rounds(0.4, 3_000_000)),
            make("fedavg-1", rounds(0.6, 3_000_000), seed=1),
        ],
        "better": [make("better-0", rounds(0.8, 1_500_000, None), method="fedper")],
        "Local": [make("local-0", rounds(0.3, 0), method="local")],
    }


def data(results: dict[str, list[Result]], places: dict[str, tuple[str, str]] | None = None) -> ReportData:
    groups = [
        Group(label, [read(one.folder, label, one.folder, []) for one in found]) for label, found in results.items()
    ]
    return ReportData(groups, [], places=places or {})


def test_accuracies_are_sorted_and_show_the_spread(results: dict[str, list[Result]]) -> None:
    chart = charts.accuracies(data(results))
    bars = {row["label"]: row for row in rows(chart) if "mean" in row}
    assert texts(chart.to_dict(), "sort")[0] == ["better", "FedAvg", "Local"]  # type: ignore[union-attr]
    std = 100 * np.std([0.4, 0.6], ddof=1)
    assert {label: bar["text"] for label, bar in bars.items()} == {
        "Local": "30.0 %",
        "FedAvg": f"50.0 ± {std:.1f} %",
        "better": "80.0 %",
    }
    assert (bars["FedAvg"]["low"], bars["FedAvg"]["high"]) == pytest.approx((50 - std, 50 + std), abs=0.01)
    each = {row["label"]: row["value"] for row in rows(chart) if "client" in row}
    assert each["better"] == pytest.approx([70, 80, 90])
    assert each["FedAvg"] == pytest.approx([40, 50, 60])  # means over seeds
    assert {label: bar.get("global") for label, bar in bars.items()} == {"Local": 30, "FedAvg": 30, "better": None}


def test_curves_are_means_over_seeds(results: dict[str, list[Result]]) -> None:
    chart, measures = charts.curves(data(results))
    assert texts(chart.to_dict(), "domain")[0] == ["better", "FedAvg", "Local"]  # type: ignore[union-attr]
    at = list(measures).index("local")
    fedavg = [row for row in rows(chart) if row["label"] == "FedAvg" and row["v"][at] is not None]
    assert [(row["round"], row["v"][at]) for row in fedavg] == [(2, pytest.approx(20)), (4, pytest.approx(50))]
    better = [row for row in rows(chart) if row["label"] == "better" and row["v"][at] is not None]
    assert [row["v"][at] for row in better] == pytest.approx([20, 80])
    assert {row["label"] for row in rows(chart) if "s" in row} == {"FedAvg"}  # a band where there are several seeds


def test_a_reference_that_is_evaluated_once_is_a_level(results: dict[str, list[Result]], make: Make) -> None:
    once = make("once", [line(1, [0, 1, 2], aggregated=stage([0.4, 0.5, 0.6], 0.5))], method="zero-shot")
    chart, measures = charts.curves(data({**results, "zero-shot": [once]}))
    at = list(measures).index("local")
    level = [(row["round"], row["v"][at]) for row in rows(chart) if row["label"] == "zero-shot"]
    assert level == [(1, pytest.approx(50)), (4, pytest.approx(50))]


def test_communication_counts_both_ways_and_all_clients(results: dict[str, list[Result]]) -> None:
    chart = charts.communication(data(results))
    sent = {label: [row["mb"] for row in rows(chart) if row["label"] == label] for label in results}
    assert sent["FedAvg"] == pytest.approx([2 * 2, 4 * 2])  # 2 x 3 MB per round over 3 clients
    assert sent["better"] == pytest.approx([2, 4])
    assert [(row["mb"], row["value"]) for row in rows(chart) if row["label"] == "Local"] == [(0, pytest.approx(30))]
    level = chart.to_dict()["layer"][0]  # type: ignore[union-attr]
    assert level["mark"]["type"] == "rule"  # across the chart


def test_communication_of_very_different_methods(make: Make) -> None:
    def once(name: str, sent: int) -> list[Result]:
        return [make(name, [line(1, [0], sent=sent, aggregated=stage([0.5] * 3))])]

    chart = charts.communication(data({"a": once("a", 1000), "b": once("b", 10**8)}))
    assert "log" in texts(chart.to_dict(), "type")  # type: ignore[union-attr]
    assert charts.communication(data({"c": once("c", 0)})) is None


def test_a_label_has_one_look_everywhere(results: dict[str, list[Result]]) -> None:
    looks = {label: look.colour for label, look in style.looks(results).items()}
    found = data(results)
    for chart in (charts.accuracies(found), charts.curves(found)[0], charts.communication(found)):
        assert chart
        scales = [one["scale"] for one in texts(chart.to_dict(), "color") if isinstance(one, dict) and "scale" in one]
        assert scales
        assert all(dict(zip(one["domain"], one["range"], strict=True)) == looks for one in scales)


def test_many_labels_are_told_apart() -> None:
    looks = style.looks(str(i) for i in range(20))
    assert len(set(looks.values())) == 20


def test_pictures_of_a_comparison(results: dict[str, list[Result]], tmp_path: Path) -> None:
    out = tmp_path / "all"
    check(draw_comparison(out, results), "comparison.png", "curves.png", "communication.png", "partition.png")
    assert draw_comparison(out, {}) == []
    assert draw_comparison(out, {"nothing": []}) == []


def test_a_comparison_of_next_to_nothing(make: Make, tmp_path: Path) -> None:
    one = make("a", [line(1, [0], aggregated=stage([None] * 3, None))])
    other = make("b", [line(1, [0], aggregated=stage([0.5, 0.5, None], None))])
    two = {"_$odd label, rather long for a picture of this width_": [one], "other": [other, other]}
    check(draw_comparison(tmp_path / "all", two), "comparison.png", "partition.png")


def test_what_was_evaluated_once_has_no_curves(make: Make, tmp_path: Path) -> None:
    out = tmp_path / "all"
    out.mkdir()
    (out / "curves.png").write_bytes(b"of an earlier comparison")
    once = {
        name: [make(name, [line(1, [0]), line(2, [0], sent=900, aggregated=stage([0.5, 0.6, 0.7]))], method=name)]
        for name in ("fedavg", "fedper")
    }
    check(draw_comparison(out, once), "comparison.png", "communication.png", "partition.png")
    assert not (out / "curves.png").exists()


def test_every_different_partition_is_drawn(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles = {}
    save = style.save

    def noted(chart: style.Chart, path: Path) -> Path:
        titles[path.name] = " ".join(chart.to_dict()["title"]["text"])
        return save(chart, path)

    monkeypatch.setattr(style, "save", noted)
    out = tmp_path / "all"
    out.mkdir()
    (out / "partition-7.png").write_bytes(b"of an earlier comparison")
    scored = [line(1, [0], aggregated=stage([0.5]))]
    small, large = (
        make(f"{limit}", scored, clients=1, dataset={"name": "digits", "limit": limit}) for limit in (100, 150)
    )
    results = {"a, few": [small], "b, few": [small], "a, many": [large]}
    places = {"a, few": ("a", "few"), "b, few": ("b", "few"), "a, many": ("a", "many")}
    check(draw_comparison(out, results, places), "comparison.png", "partition.png", "partition-2.png")
    assert titles["partition.png"] == "digits, dirichlet (few), 1 client"
    assert titles["partition-2.png"] == "digits, dirichlet (many), 1 client"
    assert not (out / "partition-7.png").exists()
    check(draw_comparison(out, {"a": [small], "b": [small]}), "comparison.png", "partition.png")
    assert titles["partition.png"] == "digits, dirichlet, 1 client", "there is but one"
    assert not (out / "partition-2.png").exists()


def test_pictures_have_a_known_format(results: dict[str, list[Result]], tmp_path: Path) -> None:
    chart = charts.communication(data(results))
    assert chart
    for name, start in (("a.svg", b"<svg"), ("a.pdf", b"%PDF"), ("a.JPG", b"\xff\xd8")):
        assert style.save(chart, tmp_path / name).read_bytes().startswith(start)
    with pytest.raises(UserError, match=r'--out = ".*a.docx" must end in .png, .svg, .pdf, .jpg'):
        style.save(chart, tmp_path / "a.docx")


def test_a_folder_is_not_replaced_by_a_picture(tmp_path: Path) -> None:
    (tmp_path / "split.png").mkdir()
    with pytest.raises(UserError, match=r"split.png. is a folder; name a file$"):
        style.check(tmp_path / "split.png")
