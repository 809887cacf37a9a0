"""The files of deploy/: every command and option in them is one of the command line, and systemd accepts the units."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from promptfed.cli.main import app

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))


def check(words: list[str]) -> None:
    """Raises if these are not a command of promptfed with its options and the right number of arguments."""
    command = get_command(app)
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    context = command.make_context(command.name, list(words), resilient_parsing=False)
    assert context.params["folder"]


def test_services_of_the_compose_file_run_commands_of_promptfed():
    found = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert set(found) == {"link", "node"}
    for service in found.values():
        check(service["command"])
        assert service["cap_drop"] == ["ALL"]
        assert "/data" in service["command"][2]
    for line in re.findall(r"exec \w+ promptfed (.*)", (DEPLOY / "compose.yaml").read_text()):
        check(line.split())


def test_the_image_installs_extras_that_exist_and_starts_promptfed():
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    assert json.loads(next(line for line in lines if line.startswith("ENTRYPOINT")).partition(" ")[2]) == ["promptfed"]
    (extras,) = re.findall(r'"\.\[(.*)\]"', "\n".join(lines))
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= set(known)
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    assert all((ROOT / name).exists() for name in copied)
    assert lines.index("USER promptfed") < lines.index('ENTRYPOINT ["promptfed"]')


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_run_commands_of_promptfed(unit):
    (started,) = re.findall(r"^ExecStart=\S+/promptfed (.*)$", unit.read_text(), re.MULTILINE)
    check(started.split())


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd here")
def test_systemd_accepts_the_units(tmp_path):
    for unit in UNITS:  # of programs that exist here
        text = unit.read_text().replace("/opt/promptfed/bin/promptfed", "/bin/true")
        (tmp_path / unit.name.replace("@", "@site")).write_text(text)
    paths = [str(path) for path in sorted(tmp_path.iterdir())]
    said = subprocess.run(["systemd-analyze", "verify", *paths], capture_output=True, text=True)
    mine = [line for line in said.stderr.splitlines() if "promptfed" in line]
    assert not mine, mine


def test_the_targets_that_describe_and_audit_what_is_installed_can_be_made():
    said = subprocess.run(["make", "-n", "sbom", "audit"], cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert "cyclonedx-py environment" in said.stdout
    assert "bandit" in said.stdout
    assert "pip-audit" in said.stdout
