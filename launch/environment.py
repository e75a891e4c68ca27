"""Prepare the project's Python environment and print its interpreter; needs nothing but Python 3.11 itself.

Usage: ``python launch/environment.py`` (environment.sh calls it).

There are two layers, both in the cache folder. One virtual environment holds all dependencies, for every checkout that
wants the same ones: it is large and slow to make. A second one for each checkout holds nothing but that checkout, in
editable mode, and sees the first. So a fresh clone is ready in seconds, and never runs another clone's code.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
LOCK_FILE, PROJECT_FILE = CHECKOUT / "requirements.lock", CHECKOUT / "pyproject.toml"
READY = ".ready"  # written last: an environment without it was interrupted
_START = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - _START:6.1f} s] {text}", file=sys.stderr, flush=True)


def requirements(project: dict[str, Any]) -> list[str]:
    """Everything that the project, its build and its extras depend on."""
    groups = [project["build-system"]["requires"], project["project"]["dependencies"]]
    groups += project["project"]["optional-dependencies"].values()
    return sorted({requirement for group in groups for requirement in group})


def _hash(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def folders(cache_dir: Path) -> tuple[Path, Path]:
    """Where the dependencies and this checkout's own environment belong; other contents mean other folders."""
    wanted = requirements(tomllib.loads(PROJECT_FILE.read_text()))
    key = _hash(sys.version, sys.base_prefix, LOCK_FILE.read_text(), wanted)
    own = _hash(key, str(CHECKOUT), PROJECT_FILE.read_text())
    return cache_dir / f"venv-{key}", cache_dir / f"venv-{key}-{own}"


def interpreter(folder: Path) -> Path:
    return folder / "bin" / "python"


def packages(folder: Path) -> Path:
    """The site-packages folder of an environment."""
    return folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def run(command: list[str | Path], what: str) -> None:
    """Run a command with its output visible, saying every 15 seconds that it goes on. Exits when it fails."""
    begin, done = time.monotonic(), threading.Event()

    def beat() -> None:
        while not done.wait(15):
            say(f"{what} ... {time.monotonic() - begin:.0f} s")

    say(f"{what} ...")
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    code = subprocess.run(list(map(str, command)), stdout=sys.stderr, check=False).returncode
    done.set()
    thread.join()
    if code:
        sys.exit(f"error: {what} failed with exit status {code}: its output stands above.")


@contextlib.contextmanager
def making(folder: Path) -> Iterator[bool]:
    """Whether ``folder`` has to be made now; one process at a time makes it, and it counts once the block ends well."""
    if (folder / READY).exists():
        yield False
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f".{folder.name}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"Another process is making {folder}; waiting for it ...")
            fcntl.flock(lock, fcntl.LOCK_EX)
        missing = not (folder / READY).exists()
        if missing:
            shutil.rmtree(folder, ignore_errors=True)
        yield missing
        if missing:
            (folder / READY).touch()


def install_dependencies(folder: Path) -> None:
    say(f"Making the environment {folder}; this happens once for each set of dependencies.")
    venv.create(folder, with_pip=True, symlinks=True)
    pip = [interpreter(folder), "-m", "pip", "--disable-pip-version-check", "install", "-c", LOCK_FILE]
    run([*pip, *requirements(tomllib.loads(PROJECT_FILE.read_text()))], "Installing SGLang and the other dependencies")


def share_scripts(dependencies: Path, folder: Path) -> None:
    """Give ``folder`` the commands of the dependencies; those in Python run with its own interpreter, so see us."""
    old, new = (f"#!{interpreter(each)}\n".encode() for each in (dependencies, folder))
    for script in (dependencies / "bin").iterdir():
        own = folder / "bin" / script.name
        if own.exists() or script.name.startswith(("pip", "python", "activate", "Activate")):
            continue
        content = script.read_bytes()
        if content.startswith(old):
            own.write_bytes(new + content.removeprefix(old))
            own.chmod(0o755)
        else:
            own.symlink_to(script)


def install_checkout(folder: Path, dependencies: Path) -> None:
    venv.create(folder, with_pip=False, symlinks=True)
    # A .pth file of a folder added by its path alone would not be read; some dependencies are found through one.
    line = f"import site; site.addsitedir({str(packages(dependencies))!r})\n"
    (packages(folder) / "_dependencies.pth").write_text(line)
    share_scripts(dependencies, folder)
    pip = [interpreter(dependencies), "-m", "pip", "--disable-pip-version-check", "--python", interpreter(folder)]
    options = ["--quiet", "--no-deps", "--no-build-isolation"]
    run([*pip, "install", *options, "--editable", CHECKOUT], "Installing this checkout")


def main() -> None:
    cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang_adaptive"
    dependencies, own = folders(cache_dir)
    with making(dependencies) as missing:
        if missing:
            install_dependencies(dependencies)
    with making(own) as missing:
        if missing:
            install_checkout(own, dependencies)
    print(interpreter(own))


if __name__ == "__main__":
    main()
