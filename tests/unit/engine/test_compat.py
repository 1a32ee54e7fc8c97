"""One place for what differs between SGLang releases, and it must speak of the one installed."""

import ast
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from extractor.engine import compat
from extractor.errors import UsageError
from extractor.ranks.place import Place

ROOT = Path(__file__).resolve().parents[3]

# In a process of its own: importing SGLang changes much, and the platform is chosen at its import.
LOOK = """
from extractor.engine import compat
from extractor.engine.cpu import platform as cpu_platform
cpu_platform.request()
version = compat.installed_version()
for (module, name), (first, last) in compat.SYMBOLS.items():
    if first <= version <= last:
        compat.symbol(module, name)
        print("FOUND", module, name)
compat.cpu_pool_classes()
"""


def test_every_symbol_is_in_the_installed_release() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOK], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    version = compat.installed_version()
    wanted = sum(first <= version <= last for first, last in compat.SYMBOLS.values())
    found = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert len(found) == wanted


def test_every_release_is_tried() -> None:
    """The newest by tests/run.sh, the oldest by .ci/run, and those between them by tests/releases.sh."""
    between = range(compat.FIRST[2] + 1, compat.LAST[2])
    listed = " ".join(f"{compat.FIRST[0]}.{compat.FIRST[1]}.{patch}" for patch in between)
    assert f"releases=({listed})" in (ROOT / "tests/releases.sh").read_text()
    for path, release in (("tests/run.sh", compat.LAST), (".ci/run", compat.FIRST)):
        assert f"={'.'.join(map(str, release))}\n" in (ROOT / path).read_text()


def test_a_symbol_that_is_missing_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    place = ("extractor.errors", "NoSuchThing")
    monkeypatch.setitem(compat.SYMBOLS, place, (compat.FIRST, compat.LAST))
    with pytest.raises(UsageError, match=r"extractor.errors.NoSuchThing is missing"):
        compat.symbol(*place)


@pytest.mark.parametrize("text", ["0.5.16", "0.5.24", "0.6.0", "1.0", "0.4.9.post2"])
def test_other_releases_are_refused_with_the_table(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: text)
    with pytest.raises(UsageError) as caught:
        compat.require_supported()
    first, *table = str(caught.value).splitlines()
    shown = ".".join(map(str, compat.installed_version()))
    assert first == f"SGLang {shown} is installed; supported:"
    assert "\n".join(table) == compat.SUPPORTED_TABLE


@pytest.mark.parametrize("text", ["0.5.17", "0.5.20", "0.5.23", "0.5.23.post1", "0.5.23+cu130"])
def test_releases_in_range_are_not(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: text)
    wanted = tuple(map(int, text.partition("+")[0].split(".")[:3]))
    assert compat.require_supported() == wanted


def test_a_missing_sglang_is_refused_with_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(UsageError, match="SGLang is not installed; supported:\n"):
        compat.require_supported()


def test_the_fused_all_reduce_is_off_unless_it_is_asked_for() -> None:
    off = {"enforce_disable_flashinfer_allreduce_fusion": True}
    assert compat.fusion_values({}) == off
    assert compat.fusion_values({"flashinfer_allreduce_fusion_backend": None}) == off
    assert compat.fusion_values({"flashinfer_allreduce_fusion_backend": "auto"}) == {}


@pytest.mark.parametrize(
    ("release", "entries"), [("0.5.17", "4|5"), ("0.5.18", "4|5"), ("0.5.19", "2|3|4|5")]
)
def test_a_second_replica_has_cores_of_its_own(
    monkeypatch: pytest.MonkeyPatch, release: str, entries: str
) -> None:
    """Old releases take an entry by tp rank and want no more than tp of them, new ones by local rank."""
    monkeypatch.setattr(importlib.metadata, "version", lambda _: release)
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)
    place = Place(rank=3, world_size=4, local_rank=3, tp=2, local_size=4)
    compat.bind_cores([2, 3, 4, 5], place)
    assert os.environ.pop("SGLANG_CPU_OMP_THREADS_BIND") == entries


def imported(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return found


def test_only_the_engine_imports_sglang() -> None:
    for path in sorted([*ROOT.glob("extractor/**/*.py"), *ROOT.glob("launch/**/*.py")]):
        names = imported(ast.parse(path.read_text()))
        tops = {name.partition(".")[0] for name in names}
        assert "sglang" not in tops or "engine" in path.parts, path


def test_the_table_speaks_of_every_symbol_that_is_looked_up() -> None:
    asked: set[tuple[str, str]] = set()
    for path in ROOT.glob("extractor/engine/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            values = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            if name == "symbol" and len(values) == 2:
                asked.add((values[0], values[1]))
    assert asked == set(compat.SYMBOLS)


def test_flash_attention_has_what_skip_kv_looks_for() -> None:
    """On a machine without its kernels the module cannot be imported: its text is looked at."""
    found = importlib.util.find_spec("sglang")
    assert found is not None and found.submodule_search_locations
    name = "srt/layers/attention/flashattention_backend.py"
    text = (Path(found.submodule_search_locations[0]) / name).read_text()
    asked = (
        "fa_skip_kv_cache",
        "fa_impl_ver",
        "kv_cache_dtype_str",
        "use_mla",
        "has_local_attention",
    )
    for attribute in asked:
        assert f"self.{attribute} = " in text, attribute


TILES = """
from extractor.engine import compat
from extractor.engine.cpu import platform as cpu_platform
cpu_platform.request()
from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_config as module
stock = module.get_default_config
assert not compat.prefer_long_tiles(100 * 1024) and module.get_default_config is stock
assert compat.prefer_long_tiles(compat.SHARED_MEMORY) and module.get_default_config is not stock

def choose(tokens, dtype, marlin):
    return module.get_default_config(tokens, 64, 1408, 2048, 6, dtype, marlin, None)

import types
module.get_exec = lambda: types.SimpleNamespace(
    deterministic=types.SimpleNamespace(enable_deterministic_inference=False)
)
rows = compat.EXPERT_ROWS * 64 // 6 + 1
assert choose(rows, None, False) == compat.EXPERT_TILE
small = choose(rows - 1, None, False)
assert small["BLOCK_SIZE_M"] < 128, small
assert choose(rows, "fp8_w8a8", False) != compat.EXPERT_TILE
assert choose(rows, None, True)["BLOCK_SIZE_M"] <= 64  # Marlin's kernels know no larger one
with compat.expert_tile(compat.EXPERT_TILE):
    from sglang.srt.layers.moe.moe_runner.triton_utils import get_config
    assert get_config() == compat.EXPERT_TILE
assert get_config() is None
"""


def test_experts_of_long_passes_get_the_long_tile_and_others_keep_theirs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TILES], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
