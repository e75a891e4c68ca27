"""The environment that the quickstart and the tests make for themselves: its keys, locks and shared commands."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "launch" / "environment.py"


@pytest.fixture
def environment():
    spec = importlib.util.spec_from_file_location("environment_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(environment, tmp_path, monkeypatch):
    """A small project of its own in the place of this one; returns a function that writes it and names the folders."""

    def write(name="one", lock="a==1\n", dependencies='["a"]', tool="1"):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        monkeypatch.setattr(environment, "CHECKOUT", folder)
        monkeypatch.setattr(environment, "LOCK_FILE", folder / "lock")
        monkeypatch.setattr(environment, "PROJECT_FILE", folder / "project.toml")
        (folder / "lock").write_text(lock)
        (folder / "project.toml").write_text(
            f'[build-system]\nrequires = ["s"]\n[project]\ndependencies = {dependencies}\n'
            f'[project.optional-dependencies]\ntest = ["t"]\n[tool]\nx = {tool}\n'
        )
        return environment.folders(tmp_path / "cache")

    return write


def test_two_checkouts_share_dependencies_but_not_their_own_code(checkout):
    (first, own_first), (second, own_second) = checkout("one"), checkout("two")
    assert first == second and own_first != own_second


def test_other_contents_mean_other_folders(checkout):
    dependencies, own = checkout()
    assert checkout() == (dependencies, own)
    assert checkout(lock="a==2\n")[0] != dependencies
    assert checkout(dependencies='["a", "b"]')[0] != dependencies
    relaxed = checkout(tool="2")
    assert relaxed[0] == dependencies and relaxed[1] != own


def test_requirements_cover_build_and_extras(environment):
    project = {
        "build-system": {"requires": ["s"]},
        "project": {"dependencies": ["a", "b"], "optional-dependencies": {"test": ["t", "a"], "bench": ["m"]}},
    }
    assert environment.requirements(project) == ["a", "b", "m", "s", "t"]


def test_an_interrupted_environment_is_made_again(environment, tmp_path):
    folder = tmp_path / "cache" / "venv"
    with pytest.raises(SystemExit), environment.making(folder) as missing:
        assert missing
        folder.mkdir()
        (folder / "half").touch()
        sys.exit("interrupted")
    with environment.making(folder) as missing:
        assert missing and not folder.exists()
        folder.mkdir()
    with environment.making(folder) as missing:
        assert not missing


def test_shared_python_commands_run_with_the_own_interpreter(environment, tmp_path):
    dependencies, own = tmp_path / "dependencies", tmp_path / "own"
    for folder in (dependencies, own):
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").symlink_to(sys.executable)
    (dependencies / "bin" / "tool").write_text(f"#!{dependencies}/bin/python\nimport sys; print(sys.executable)\n")
    (dependencies / "bin" / "pip3").write_text(f"#!{dependencies}/bin/python\n")
    (dependencies / "bin" / "ninja").write_bytes(b"\x7fELF")
    environment.share_scripts(dependencies, own)
    shown = subprocess.run([own / "bin" / "tool"], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == str(own / "bin" / "python")
    assert (own / "bin" / "ninja").resolve() == dependencies / "bin" / "ninja"
    assert not (own / "bin" / "pip3").exists()


def test_a_given_interpreter_is_taken_as_it_is():
    script = f'. {SCRIPT.with_suffix(".sh")}; echo "$PYTHON"'
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        env={"ADAPTIVE_PYTHON": sys.executable, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == sys.executable


def test_a_machine_without_python_is_told(tmp_path):
    for command in ("bash", "dirname"):
        (tmp_path / command).symlink_to(Path("/usr/bin") / command)
    result = subprocess.run(
        [tmp_path / "bash", "-c", f". {SCRIPT.with_suffix('.sh')}"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1 and "no Python 3.11" in result.stderr


def test_every_test_module_has_a_name_of_its_own():
    """pytest imports them by it, and one run of all of them would stop at the second."""
    paths = [path for path in Path(__file__).parents[1].rglob("test_*.py") if "__pycache__" not in path.parts]
    names = [path.name for path in paths]
    assert len(names) > 50 and sorted(set(names)) == sorted(names)
