"""The wheel: what it carries is enough to run from elsewhere, templates and console script included."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.written import make_layout, make_samples, write_folder

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        command, cwd=cwd, env={**env, **environment}, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources and installed into a folder of its own."""
    folder = tmp_path_factory.mktemp("wheel")
    files = subprocess.run(
        ["git", "ls-files", "extractor", "pyproject.toml", "README.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for name in files:
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "source" / name).write_bytes((ROOT / name).read_bytes())
    build = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    done = run(sys.executable, *build, cwd=folder / "source")
    assert done.returncode == 0, done.stdout + done.stderr
    wheel = next(folder.glob("*.whl"))
    names = zipfile.ZipFile(wheel).namelist()
    assert "extractor/py.typed" in names and "extractor/verbs/report/page.html.jinja" in names
    assert not [name for name in names if name.startswith(("tests", "launch", "benchmarks"))]
    pip = ["-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    done = run(sys.executable, *pip, "--target", str(folder / "site"), str(wheel), cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "site"


def test_it_runs_from_elsewhere(installed: Path, tmp_path: Path):
    samples = make_samples()
    write_folder(tmp_path / "out", make_layout(samples=samples), samples)
    script = installed / "bin" / "extractor"
    for command in ([str(script)], [sys.executable, "-m", "extractor"]):
        done = run(*command, "--help", cwd=tmp_path, PYTHONPATH=str(installed))
        assert done.returncode == 0 and "convert" in done.stdout, done.stderr
        assert max(map(len, done.stdout.splitlines())) <= 80
    done = run(str(script), "report", "out", cwd=tmp_path, PYTHONPATH=str(installed))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000
    convert = ("convert", "out", "new", "--layout", "specforge")
    done = run(str(script), *convert, cwd=tmp_path, PYTHONPATH=str(installed))
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "new").rglob("*.ckpt"))) == len(samples)
