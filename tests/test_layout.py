"""The shape of the package: import direction, listed packages, what the wheel puts where."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import sigma0

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parent.parent
# A module may import modules of its own or an earlier level.
LEVELS = [
    {"sigma0.kernels"},
    {"sigma0.transfer", "sigma0.ops"},
    {"sigma0.finite", "sigma0.limits"},
    {"sigma0.settings", "sigma0.frontier", "sigma0.savings", "sigma0.outputs", "sigma0.parallel"},
    {"sigma0.repetition"},
    {"sigma0.exit_thresholds", "sigma0.record", "sigma0.slots"},
    {"sigma0.cache", "sigma0.exits"},
    {"sigma0.verdict", "sigma0.canary", "sigma0.trajectory"},
    {"sigma0.tokens"},
    {
        "sigma0.dropped",
        "sigma0.effort",
        "sigma0.endings",
        "sigma0.estimates",
        "sigma0.exit_options",
        "sigma0.extras",
        "sigma0.forced",
    },
    {"sigma0.forced_grid", "sigma0.pass_rows"},
    {"sigma0.completion"},
    {"sigma0.wave"},
    {"sigma0.decoding"},
    {"sigma0.stateless"},
    {"sigma0.verify"},
    {"sigma0.results", "sigma0.stored_settings"},
    {"sigma0.generation"},
    {"sigma0.models"},
    {"sigma0.words"},
    {"sigma0.quantities"},
    {"sigma0.claims"},
    {"sigma0.evidence", "sigma0.support"},
    {"sigma0.grounding", "sigma0.special_tokens"},
    {"sigma0.loading", "sigma0.text", "sigma0.export"},
    {
        "sigma0.ladder.budget",
        "sigma0.ladder.triggers",
        "sigma0.ladder.hysteresis",
        "sigma0.ladder.choosing",
    },
    {"sigma0.ladder.rungs", "sigma0.ladder.trail"},
    {"sigma0.ladder.results"},
    {"sigma0.ladder.reader", "sigma0.ladder.settling", "sigma0.ladder.endpoint"},
    {"sigma0.ladder.token_unit", "sigma0.ladder.answer_unit"},
    {"sigma0.ladder.texts"},
    {"sigma0.ladder.ladder"},
    {"sigma0.ladder"},
    {
        "sigma0.reason.cgroups",
        "sigma0.reason.inside",
        "sigma0.reason.isolation",
        "sigma0.reason.packing",
        "sigma0.reason.probe",
    },
    {"sigma0.reason.accounting", "sigma0.reason.seccomp"},
    {"sigma0.reason.watching"},
    {"sigma0.reason.execution"},
    {"sigma0.reason.messages", "sigma0.reason.trail", "sigma0.reason.sandbox"},
    {"sigma0.reason.chat", "sigma0.reason.desk"},
    {"sigma0.reason.policies"},
    {"sigma0.reason.effort", "sigma0.reason.memory"},
    {"sigma0.reason.verify_loop"},
    {"sigma0.reason.bare"},
    {"sigma0.reason.trees", "sigma0.reason.reports", "sigma0.reason.actions"},
    {"sigma0.reason.patches", "sigma0.reason.escalation"},
    {"sigma0.reason.workspace"},
    {"sigma0.reason.work_strategies"},
    {"sigma0.reason.agent_context", "sigma0.reason.agent_settings"},
    {"sigma0.reason.agent"},
    {"sigma0.reason.lemma.graph", "sigma0.reason.lemma.origins", "sigma0.reason.lemma.boxed"},
    {"sigma0.reason.lemma.gate", "sigma0.reason.lemma.plan_formats", "sigma0.reason.lemma.prompts"},
    {"sigma0.reason.lemma.settings"},
    {"sigma0.reason.lemma.asking", "sigma0.reason.lemma.picture", "sigma0.reason.lemma.running"},
    {"sigma0.reason.lemma.planning", "sigma0.reason.lemma.counting"},
    {"sigma0.reason.lemma.proving", "sigma0.reason.lemma.repair"},
    {"sigma0.reason.lemma.traversing"},
    {"sigma0.reason.lemma.solver"},
    {"sigma0.reason.lemma"},
    {"sigma0.reason"},
    {"sigma0"},
    {"sigma0.doctor", "sigma0.prompts", "sigma0.telemetry"},
    {"sigma0.learn_then_test"},
    {"sigma0.calibration"},
    {"sigma0.latency", "sigma0.risk", "sigma0.ladder_calibration"},
    {"sigma0.calibration_report"},
    {"sigma0.rendering"},
    {"sigma0.calibrate_command", "sigma0.ladder_command"},
    {"sigma0.solve_models", "sigma0.solve_progress", "sigma0.trail_command"},
    {"sigma0.solve_command"},
    {"sigma0.serve", "sigma0.bench"},
    {"sigma0.cli"},
]


def sources():
    yield from sorted((ROOT / "sigma0").glob("**/*.py"))
    for folder in ("kernels", "serve", "bench"):
        yield from (ROOT / "sigma0" / path.relative_to(ROOT) for path in sorted((ROOT / folder).glob("**/*.py")))


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] in ("__init__", "__main__") else parts)


def level(name):
    matching = [
        (len(entry), index)
        for index, entries in enumerate(LEVELS)
        for entry in entries
        if name == entry or (entry != "sigma0" and name.startswith(entry + "."))
    ]
    assert matching, f"{name} stands in no level: add it where it belongs"
    return max(matching)[1]


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            # a module that is imported out of its package is what is imported, not the package
            folder = ROOT.joinpath(*node.module.split("."))
            modules = {alias.name for alias in node.names if (folder / f"{alias.name}.py").is_file()}
            yield from (f"{node.module}.{name}" for name in modules)
            if len(modules) < len(node.names):
                yield node.module


@pytest.mark.parametrize("path", sorted(set(sources())), ids=lambda path: module_name(path))
def test_imports_run_one_way(path):
    name = module_name(path)
    for target in imported(path):
        if target.split(".")[0] == "sigma0":
            assert level(target) <= level(name), f"{name} imports {target}"
        assert target.split(".")[0] not in ("kernels", "serve", "bench"), f"{name} imports {target} past the package"
        # the command shows tables; ops chooses, and a benchmark measures, what lies there
        by_name = name == "sigma0.ops" or name.startswith(("sigma0.kernels", "sigma0.bench"))
        assert by_name or not target.startswith("sigma0.kernels"), f"{name} imports {target}: ops chooses kernels"
    if name.startswith("sigma0.kernels") and path.name != "__main__.py":
        others = {target.split(".")[0] for target in imported(path)} - set(sys.stdlib_module_names)
        assert others <= {"torch", "triton", "sigma0"}
    if name == "sigma0.serve.scheduler":
        assert "torch" not in {target.split(".")[0] for target in imported(path)}


def test_files_stay_short():
    for path in set(sources()):
        assert len(path.read_text().splitlines()) <= 500, path


def test_symlinks_are_relative_and_have_no_init():
    for name in ("kernels", "serve", "bench"):
        link = ROOT / "sigma0" / name
        assert link.is_symlink()
        assert not link.readlink().is_absolute()
        assert not (link / "__init__.py").exists()
        assert (link / "README.md").is_file()


def package_folders():
    """Every folder of the package that holds Python or data."""
    found = {"sigma0"}
    for base in [ROOT / "sigma0", *(ROOT / "sigma0" / name for name in ("kernels", "serve", "bench"))]:
        for path in base.glob("**/*"):
            folder = path.parent
            if path.is_file() and "__pycache__" not in path.parts:
                found.add(".".join(folder.relative_to(ROOT).parts))
    return found


def test_every_package_is_listed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(package_folders() - {"sigma0.bench.results"})


@pytest.mark.slow
def test_the_wheel_holds_sigma0_and_nothing_else(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"sigma0"}
    for name in (
        "sigma0/py.typed",
        "sigma0/kernels/README.md",
        "sigma0/serve/README.md",
        "sigma0/bench/README.md",
        "sigma0/bench/pocket/world.py",
        "sigma0/models/ouro.py",
    ):
        assert name in names, name
    files = zipfile.ZipFile(wheel).infolist()
    limits = {"pocket": 8, "pocket-large": 24}
    assert set(sigma0.shipped_models()) <= set(limits)
    for model in sigma0.shipped_models():
        folder = f"sigma0/checkpoints/{model}/"
        for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"):
            assert f"{folder}{name}" in names, f"{folder}{name}"
        assert sum(info.file_size for info in files if info.filename.startswith(folder)) <= limits[model] * 2**20
