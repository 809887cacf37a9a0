import tomllib

import pytest

from promptfed import UserError, methods
from promptfed.runs import api
from promptfed.runs import config as C


def test_later_tables_go_over_earlier_ones():
    config = C.make({"rounds": 3, "method": {"name": "fedprox", "mu": 0.1}}, {"method": {"mu": 0.2}})
    assert config.rounds == 3
    assert config.method.method.mu == 0.2


def test_a_section_may_be_given_by_its_name():
    assert C.make({"method": "fedrep", "dataset": "mnist"}).dataset.name == "mnist"


def test_another_method_keeps_the_settings_that_it_has_too():
    config = C.make({"method": {"name": "pfedpt", "lr": 0.1, "prompt_size": 2}}, {"method": "fedavg"})
    assert config.method.method.lr == 0.1


def test_a_setting_given_with_the_name_must_fit_it():
    with pytest.raises(UserError, match=r'method\.prompt_size is not a setting of "fedavg"'):
        C.make({"method": {"name": "fedavg", "prompt_size": 2}})


@pytest.mark.parametrize("preset", C.presets())
def test_presets_are_valid_and_survive_toml(preset):
    table = {key: value for key, value in C.read(preset).items() if key != "compare"}
    config = C.make(table)
    text = C.dump(config.complete())
    assert C.make(tomllib.loads(text)) == C.make(config.complete())
    assert C.make(tomllib.loads(text)).complete() == config.complete()
    assert C.preset_about(preset)


def test_any_character_survives_toml(tmp_path):
    file = tmp_path / "config.toml"
    given = {"dataset": {"name": 'bilder 😀/\N{OLD ITALIC LETTER A} "quoted" \\'}}
    config = C.make(given)
    file.write_bytes(C.dump(config.complete()).encode())
    assert C.make(C.read(file)).complete() == config.complete()


def test_what_is_none_is_left_out_of_toml():
    assert tomllib.loads(C.dump({"a": None, "b": {"c": None, "d": (1, 2)}})) == {"b": {"d": [1, 2]}}


def test_what_is_written_is_complete():
    table = C.make({}).complete()
    assert set(table) == set(C.Config.model_fields) - {"consortium"}
    assert set(table["method"]) == {"name", *methods.fields("pfedpt")}
    assert table["partition"]["alpha"] == 0.3


def test_published_settings_of_pfedpt():
    config = C.make(api.without_compare(C.read("pfedpt")))
    m = config.method.method
    assert (m.epochs, m.lr, m.batch_size, m.optimizer, m.momentum) == (5, 0.005, 16, "sgd", 0)
    t = m.tuning
    assert (t.prompt, t.prompt_size, t.prompt_epochs, t.prompt_lr, t.joint) == ("padding", 4, 5, 1.0, False)
    assert (config.rounds, config.fraction, config.partition.partition.clients) == (150, 0.2, 50)


def test_settings_of_pfedpt_in_its_authors_code():
    table = C.read("pfedpt-code")
    config = C.make(api.without_compare(table))
    m, t = config.method.method, config.method.method.tuning
    assert (m.epochs, m.lr, m.batch_size, m.momentum) == (5, 0.05, 16, 0)
    assert (t.prompt_momentum, t.keep_momentum, t.prompt_size, t.prompt_epochs, t.prompt_lr) == (0.5, True, 2, 5, 1.0)
    assert table["compare"]["show"] == ["weighted"]
    babu = C.make(C.read("fedbabu-code"))
    assert (babu.method.method.lr, babu.method.method.finetune_epochs) == (0.05, 1)
    for code in (config, babu):
        p = code.partition.partition
        assert (code.partition.name, p.alpha, p.clients, p.min_samples, p.capped) == ("dirichlet", 0.3, 50, 8, True)
        assert (p.split, code.dataset.splits, code.backbone.name) == ((0.75, 0.0, 0.25), "all", "cnn-code")
        assert (code.rounds, code.fraction) == (150, 0.2)


@pytest.mark.parametrize(
    ("words", "table"),
    [
        (["rounds=5", "method=fedavg"], {"rounds": 5, "method": {"name": "fedavg"}}),
        (["method.mu=1e-3", "method=fedprox"], {"method": {"mu": 1e-3, "name": "fedprox"}}),
        (["partition.split=[.6,.2,.2]"], {"partition": {"split": [0.6, 0.2, 0.2]}}),
        (["eval.datasets=[digits, my/photos]"], {"eval": {"datasets": ["digits", "my/photos"]}}),
        (["eval.datasets=[a,[b,c]]"], {"eval": {"datasets": "[a,[b,c]]"}}),  # stays text
        (["eval.datasets=[a,,b]"], {"eval": {"datasets": "[a,,b]"}}),
        (["method.joint=false", "dataset.name=a/b"], {"method": {"joint": False}, "dataset": {"name": "a/b"}}),
    ],
)
def test_assignments(words, table):
    assert C.parse_assignments(words) == table


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"roundz": 1}, 'roundz is not a setting; did you mean "rounds"?'),
        ({"eval": {"evry": 1}}, 'eval.evry is not a setting; did you mean "eval.every"?'),
        ({"method": "pfedtp"}, 'method.name = "pfedtp" is unknown; did you mean "pfedpt"?'),
        ({"method": "fedavg+tp"}, "plug-in"),
        ({"method": {"name": "fedprox", "mu": -1}}, "method.mu = -1 should be greater than or equal to 0"),
        ({"partition": "dirichlt"}, 'partition.name = "dirichlt" is unknown; did you mean "dirichlet"?'),
        ({"partition": {"alhpa": 1}}, 'partition.alhpa is not a setting of "dirichlet"; did you mean "alpha"?'),
        ({"partition": {"alpha": 0}}, "partition.alpha = 0 should be greater than 0"),
        ({"rounds": "many"}, "rounds = 'many' should be a valid integer"),
        ({"fraction": 2}, "fraction = 2 should be less than or equal to 1"),
        ({"eval": 3}, "eval = 3 must be a name or a table of settings"),
        ({"eval": {"after_local": "some"}}, "eval.after_local = 'some' should be 'none', 'participants' or 'all'"),
        ({"engine": {"workers": -1}}, "engine.workers = -1 should be greater than or equal to 0"),
        ({"method": "nowhere:Thing"}, "cannot be imported"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_the_setting(table, says):
    with pytest.raises(UserError) as caught:
        C.make(table)
    assert str(caught.value).startswith(says) or says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_mistake_is_said_once():
    with pytest.raises(UserError, match=r"^rounds = 'many' should be a valid integer$"):
        C.make({"rounds": "many"})
    with pytest.raises(UserError, match=r"^partition\.split = \[0\.5, 0\.1\] has too few values$"):
        C.make({"partition": {"split": [0.5, 0.1]}})


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        C.read(tmp_path / "nothing.toml")
    (tmp_path / "bad.toml").write_text("rounds = = 3")
    with pytest.raises(UserError, match="not valid TOML"):
        C.read(tmp_path / "bad.toml")
    with pytest.raises(UserError, match='did you mean "quickstart"'):
        C.read("quickstrat")


def test_a_folder_with_the_name_of_a_preset_does_not_hide_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "papers").mkdir()
    assert C.read("papers")["compare"]
