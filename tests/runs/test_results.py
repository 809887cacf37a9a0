"""What Python and notebooks show of a run."""

import promptfed

SETTINGS = {
    "method": {"name": "fedavg", "epochs": 1},
    "dataset": {"name": "digits", "limit": 60, "size": 16},
    "partition": {"name": "iid", "clients": 2},
    "backbone": "cnn-code",
    "engine": {"workers": 1},
    "rounds": 2,
}


def test_a_run_shows_progress_and_a_short_result(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path / "cache"))
    result = promptfed.run(**SETTINGS, out=tmp_path / "run")
    said = capsys.readouterr()
    assert [line.split()[1:4] for line in said.err.splitlines()] == [
        ["decoding", "digits:", "0"],
        ["round", "1/2", "training:"],
        ["round", "1/2", "loss"],
        ["round", "2/2", "loss"],
    ]
    assert said.out == ""
    assert repr(result).startswith("<Result of fedavg on digits, seed 0, 2 rounds: local accuracy mean ")
    assert str(tmp_path / "run") in repr(result)
    assert len(repr(result)) < 300
    assert [line["round"] for line in result.rounds] == [1, 2]
    assert "vconcat" in result.plot().to_dict()
    shown = result._repr_html_()
    assert "<td>aggregated</td>" in shown
    assert "<svg" in shown
    promptfed.run(**SETTINGS, out=tmp_path / "silent", progress=False)
    seen = []

    class View:
        def begin(self, round, clients):
            seen.append((round, len(clients)))

        def on_notice(self, notice):
            pass

        def end(self, line):
            seen.append(line["round"])

    promptfed.run(**SETTINGS, out=tmp_path / "viewed", view=View())
    assert seen == [(1, 2), 1, (2, 2), 2]
    assert capsys.readouterr().err == ""
    promptfed.compare(**{**SETTINGS, "method": {"epochs": 1}}, methods=["local"], out=tmp_path / "both")
    assert "1/1 local  round 2/2" in capsys.readouterr().err
