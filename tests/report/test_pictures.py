import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from handmade import line, stage
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from PIL import Image

from promptfed.clients.store import Store
from promptfed.data import Federation, heatmap
from promptfed.report import column_figures, comparison_figures, draw_comparison, draw_run, prompts, run_figures, style
from promptfed.report.runs import Run
from promptfed.runs import config as C
from promptfed.runs.api import Result, run
from promptfed.runs.build import assemble

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


def drawn(axes: Axes) -> dict[str, tuple[list[float], list[float]]]:
    """Label -> the points of a line."""
    return {
        str(one.get_label()): (np.asarray(one.get_xdata()).tolist(), np.asarray(one.get_ydata()).tolist())
        for one in axes.get_lines()
    }


def words(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


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
    figure = run_figures.curves(Run.read(make("a", some_rounds()).folder))
    assert figure
    accuracy, loss = figure.axes
    lines = drawn(accuracy)
    assert lines["local: mean over clients, own test data"] == ([2, 4], pytest.approx([30, 60]))
    assert lines["global: everybody's test data"] == ([2, 4], [25, 35])
    # the scores of everybody at the end are no point of the line of participants
    assert lines["after local training: that round's clients"] == ([2, 4], pytest.approx([60, 55]))
    assert lines["after local training: all clients"] == ([4], [75])
    band = next(one for one in accuracy.collections if one.get_label() == "worst to best client")
    corners = np.vstack([path.vertices for path in band.get_paths()])
    assert {tuple(corner) for corner in corners.tolist()} == {(2.0, 20.0), (2.0, 40.0), (4.0, 40.0), (4.0, 80.0)}

    (rounds, values), (lost, _) = drawn(loss).values()
    assert rounds == [1, 2, 3, 4]
    assert values == pytest.approx([2.0, 1.5, np.nan, 1.0], nan_ok=True)
    assert lost == [3]
    assert "(2 times)" in loss.get_legend().get_texts()[0].get_text()  # type: ignore[union-attr]


def test_legends_stay_inside_the_picture(make: Make) -> None:
    figure = run_figures.curves(Run.read(make("a", some_rounds()).folder))
    assert figure
    figure.draw_without_rendering()
    assert len(words(figure)) == 6
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1


def test_who_was_not_evaluated_is_among_the_clients(make: Make) -> None:
    folder = make("a", [line(1, [0, 2], aggregated=stage([0.4, 0.8], None, [0, 2]))]).folder
    figure = run_figures.clients(Run.read(folder))
    assert figure
    assert [label.get_text() for label in figure.axes[1].get_xticklabels()] == ["2", "0", "1"]
    assert "not evaluated" in [text.get_text() for text in figure.axes[0].texts]
    assert "1 of 3 not evaluated" in figure.get_suptitle().replace("\n", " ")


def test_names_are_cut_where_they_stay_apart() -> None:
    names = ["short", "a name that is rather long", "hospital of the city, north", "hospital of the city, south"]
    assert style.short(names, 18) == ["short", "a name that is ra…", "hospital…ty, north", "hospital…ty, south"]
    twins = ["x" * 30 + "1" + "y" * 30, "x" * 30 + "2" + "y" * 30]
    assert style.short(twins, 18) == twins


def test_after_local_of_full_rounds_is_one_line(make: Make) -> None:
    lines = [line(r, [0, 1, 2], aggregated=stage([0.1] * 3), after_local=stage([0.2] * 3)) for r in (1, 2)]
    figure = run_figures.curves(Run.read(make("a", lines).folder))
    assert figure
    assert drawn(figure.axes[0])["after local training: all clients"] == ([1, 2], pytest.approx([20, 20]))


def test_clients_are_sorted_by_accuracy(make: Make) -> None:
    folder = make("a", some_rounds()).folder
    figure = run_figures.clients(Run.read(folder))
    assert figure
    top, bottom = figure.axes
    assert [bar.get_height() for bar in top.patches] == pytest.approx([80, 40, 0])
    assert [label.get_text() for label in bottom.get_xticklabels()] == ["2", "0", "1"]
    assert sum("no test data" in text.get_text() for text in top.texts) == 1
    shares = Run.read(folder).shares
    assert [bar.get_height() for bar in bottom.patches[:3]] == [shares[i].train for i in (2, 0, 1)]


def test_hundreds_of_clients_are_one_shape(make: Make) -> None:
    accuracies: list[float | None] = [i / 60 for i in range(60)]
    accuracies[7] = None
    figure = run_figures.clients(Run.read(make("a", [line(1, [0], aggregated=stage(accuracies))], clients=60).folder))
    assert figure
    top, bottom = figure.axes
    assert len(top.patches) == 1
    assert "1 without test data" in bottom.get_xlabel()


def test_pictures_of_a_run(make: Make) -> None:
    folder = make("a", some_rounds()).folder
    check(draw_run(folder), "curves.png", "clients.png", "partition.png")
    assert not list(folder.glob("*.part"))


@pytest.mark.parametrize("clients", [1, 4, 41, 500])
def test_any_number_of_clients(make: Make, clients: int) -> None:
    accuracies = np.random.default_rng(0).random(clients).tolist()
    folder = make("a", [line(1, range(clients), aggregated=stage(accuracies))], clients=clients).folder
    check(draw_run(folder), "curves.png", "clients.png", "partition.png")


def test_a_run_that_goes_on_is_drawn_as_far_as_it_is(make: Make) -> None:
    check(draw_run(make("begun", []).folder), "partition.png")
    check(draw_run(make("unscored", [line(1, [0])]).folder), "curves.png", "partition.png")
    cut = make("cut", some_rounds()).folder
    with (cut / "rounds.jsonl").open("a") as file:
        file.write('{"round": 5, "cli')
    check(draw_run(cut), "curves.png", "clients.png", "partition.png")


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
    check(draw_run(make("a", some_rounds(), clients=0).folder), "curves.png", "clients.png")


def test_a_dataset_that_is_gone_costs_the_pictures_that_need_it(make: Make) -> None:
    folder = make("a", some_rounds()).folder
    file = folder / "config.toml"
    file.write_text(file.read_text().replace("limit = 120", "limit = 100"))
    with pytest.warns(UserWarning, match="no picture of the partition and the prompts: .* another dataset"):
        check(draw_run(folder), "curves.png", "clients.png")


def test_words_are_taken_as_they_stand(make: Make) -> None:
    folder = make("a", some_rounds()).folder
    split = folder / "partition.json"
    split.write_text(split.read_text().replace('"client-0"', '"$a_b"').replace('"client-1"', r'"_x$y\\frac$"'))
    for figure in (run_figures.curves(Run.read(folder)), run_figures.clients(Run.read(folder))):
        assert figure
        style.save(figure, folder / "a.png")


# ---- prompts


@pytest.mark.parametrize("template", ["padding", "fixed-patch", "random-patch"])
def test_prompts_are_read_from_the_store(make: Make, template: str) -> None:
    lines = [line(1, [0, 1], left_out=[1]), line(2, [2])]
    folder = make("a", lines, method={"name": "pfedpt", "prompt": template, "prompt_size": 2}).folder
    tuning = prompts.pixel_prompt(Run.read(folder))
    assert tuning
    parts = assemble(C.make(C.read(folder / "config.toml")), partition=folder / "partition.json")
    start = tuning.start(parts.model, 0)
    store = Store(folder / "clients")
    remembered = {f"private/{name}": p + 1 for name, p in start.items()}
    store.put(1, {0: {**remembered, "memory/head.weight": torch.ones(2)}})
    store.put(2, {2: remembered})
    store.put(3, {2: {name: p + 5 for name, p in remembered.items()}})  # a round that was not completed
    store.close()

    found = prompts.read(Run.read(folder), tuning, parts.federation.dataset)
    assert found
    assert found.round == 2
    assert list(found.clients) == [0, 2]
    assert found.start.shape == parts.federation.dataset.images.shape[2:] + parts.federation.dataset.images.shape[1:2]
    for image in found.clients.values():
        np.testing.assert_allclose((image - found.start)[found.inside], 1, atol=1e-5)
        assert not image[~found.inside].any()
    figure = prompts.draw(Run.read(folder), found)
    assert [axes.get_title() for axes in figure.axes if axes.get_title()] == ["at the start", "client 0", "client 2"]
    check(draw_run(folder), "curves.png", "partition.png", "prompts.png")


def test_prompts_of_a_method_that_has_none(make: Make) -> None:
    assert prompts.pixel_prompt(Run.read(make("plain", []).folder)) is None
    assert prompts.pixel_prompt(Run.read(make("tokens", [], method="pfedpt-tokens").folder)) is None


def test_at_most_sixteen_prompts_are_shown() -> None:
    image = np.zeros((4, 4, 1))
    few = prompts._some(list(range(100, 600)))
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
    check(draw_run(done.folder), "curves.png", "clients.png", "partition.png", "prompts.png")
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


def read(results: dict[str, list[Result]]) -> dict[str, list[Run]]:
    return {label: [Run.read(one.folder) for one in found] for label, found in results.items()}


def test_bars_are_sorted_and_show_the_spread(results: dict[str, list[Result]]) -> None:
    figure = comparison_figures.bars({k: [one.numbers for one in v] for k, v in results.items()}, "digits")
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["Local", "FedAvg", "better"]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([30, 50, 80])
    assert [text.get_text() for text in axes.texts] == [
        "30.0 %",
        f"50.0 ± {100 * np.std([0.4, 0.6], ddof=1):.1f} %",
        "80.0 %",
    ]
    worst = [one.get_xdata()[0] for one in axes.get_lines() if one.get_marker() == "v"]
    wide = [one.get_xdata()[0] for one in axes.get_lines() if one.get_marker() == "o"]
    assert worst == pytest.approx([20, 40, 70])
    assert wide == pytest.approx([30, 30])  # one of them has no global accuracy


def test_curves_are_means_over_seeds(results: dict[str, list[Result]]) -> None:
    figure = comparison_figures.curves(read(results), "digits")
    assert words(figure) == ["better", "FedAvg", "Local"]  # as the lines end
    fedavg, better, local = figure.axes[0].get_lines()
    assert np.asarray(fedavg.get_xdata()).tolist() == [2, 4]
    assert np.asarray(fedavg.get_ydata()).tolist() == pytest.approx([20, 50])
    assert np.asarray(better.get_ydata()).tolist() == pytest.approx([20, 80])
    assert len(figure.axes[0].collections) == 1  # a band only where there are several seeds
    assert len({one.get_color() for one in (fedavg, better, local)}) == 3


def test_communication_counts_both_ways_and_all_clients(results: dict[str, list[Result]]) -> None:
    figure = comparison_figures.communication(read(results), "digits")
    assert figure
    fedavg, better, local = figure.axes[0].get_lines()
    assert np.asarray(fedavg.get_xdata()).tolist() == pytest.approx([2 * 2, 4 * 2])  # 2 x 3 MB a round over 3 clients
    assert np.asarray(better.get_xdata()).tolist() == pytest.approx([2, 4])
    assert list(local.get_ydata()) == pytest.approx([30, 30])  # a level across the picture
    assert "exchanges nothing" in words(figure)[-1].replace("\n", " ")


def test_communication_of_very_different_methods(make: Make) -> None:
    def once(name: str, sent: int) -> list[Run]:
        return [Run.read(make(name, [line(1, [0], sent=sent, aggregated=stage([0.5] * 3))]).folder)]

    figure = comparison_figures.communication({"a": once("a", 1000), "b": once("b", 10**8)}, "digits")
    assert figure
    assert figure.axes[0].get_xscale() == "log"
    assert comparison_figures.communication({"c": once("c", 0)}, "digits") is None


def test_a_label_has_one_look_everywhere(results: dict[str, list[Result]]) -> None:
    looks = style.looks(results)
    bars = comparison_figures.bars({k: [one.numbers for one in v] for k, v in results.items()}, "digits").axes[0]
    lines = comparison_figures.curves(read(results), "digits").axes[0].get_lines()
    assert [one.get_color() for one in lines] == [look.colour for look in looks.values()]
    colours = dict(zip(["Local", "FedAvg", "better"], (bar.get_facecolor() for bar in bars.patches), strict=True))
    assert {label: to_rgba(look.colour) for label, look in looks.items()} == colours


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
    figure = comparison_figures.communication(read(once), "digits")
    assert figure
    assert [one.get_linestyle() for one in figure.legends[0].get_lines()] == ["None", "None"]
    assert column_figures.panels(read(once), {"fedavg": ("fedavg", "A"), "fedper": ("fedper", "A")}) is None


def test_every_different_partition_is_drawn(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles = {}
    draw = heatmap.draw

    def noted(federation: Federation, path: Path) -> None:
        titles[path.name] = federation.about["kind"]
        draw(federation, path)

    monkeypatch.setattr(heatmap, "draw", noted)
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
    assert titles == {"partition.png": "dirichlet (few)", "partition-2.png": "dirichlet (many)"}
    assert not (out / "partition-7.png").exists()
    check(draw_comparison(out, {"a": [small], "b": [small]}), "comparison.png", "partition.png")
    assert titles["partition.png"] == "dirichlet", "there is but one"
    assert not (out / "partition-2.png").exists()


def test_no_method_is_best_where_all_are_level(make: Make) -> None:
    run = Run.read(make("a", [line(1, [0], aggregated=stage([0.5]))], clients=1).folder)
    other = Run.read(make("b", [line(1, [0], aggregated=stage([0.6]))], clients=1).folder)
    places = {"a, level": ("a", "level"), "b, level": ("b", "level"), "a, odd": ("a", "odd"), "b, odd": ("b", "odd")}
    runs = {"a, level": [run], "b, level": [run], "a, odd": [run], "b, odd": [other]}
    figure = column_figures.matrix(runs, places)
    assert [text.get_text() for text in figure.axes[0].texts if text.get_fontweight() == "bold"] == ["60.0"]
