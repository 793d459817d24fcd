"""The shape of the package: import direction, listed packages, what the wheel puts where."""

import ast
import os
import re
import subprocess
import sys
import zipfile
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import sigma0

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parent.parent
# Imports go down only: a module imports modules of its own or an earlier level. A name stands for all that lies in it.
LEVELS = [
    {"checkpoints", "children", "config", "cpp_compiler", "errors", "jsonl", "lazy", "presence"},
    {"kernels"},
    {"decode"},
    {"signals"},
    {"models"},
    {"api"},
    {"", "registration"},
    {"ladder"},
    {"reason", "calibrate"},
    {"commands"},
    {"serve"},
    {"bench"},
    {"cli"},
]
LINKS = ("kernels", "serve", "bench")
# The folders of a folder, in the same order.
FOLDERS = {"serve": ["engine", "api", "cluster"], "bench": ["core"]}


def sources():
    yield from sorted((ROOT / "sigma0").glob("**/*.py"))
    for folder in LINKS:
        yield from (ROOT / "sigma0" / path.relative_to(ROOT) for path in sorted((ROOT / folder).glob("**/*.py")))


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] in ("__init__", "__main__") else parts)


def level(name):
    """Place of a module's folder, and of the folder within it where those have an order."""
    _, folder, within = (*name.split("."), "", "")[:3]
    (place,) = (index for index, names in enumerate(LEVELS) if folder in names)
    order = FOLDERS.get(folder, [])
    return place, order.index(within) if within in order else len(order)


# the statement stands on lines of its own, as ruff has it, so that not all of a file need be parsed
IMPORT = re.compile(r"^[ \t]*((?:from \S+ )?import (?:\([^)]*\)|[^\n]*))", re.MULTILINE)


@cache
def imported(path):
    result = set()
    for statement in IMPORT.findall(path.read_text()):
        (node,) = ast.parse(statement).body
        if isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
        else:
            assert node.level == 0, f"{path}: relative import"
            # a module that is imported out of its package is what is imported, not the package
            folder = ROOT.joinpath(*node.module.split("."))
            modules = {alias.name for alias in node.names if (folder / f"{alias.name}.py").is_file()}
            result |= {f"{node.module}.{name}" for name in modules}
            if len(modules) < len(node.names):
                result.add(node.module)
    return result


@cache
def graph():
    current = re.compile(r"sigma0\b")
    return {module_name(path): set(filter(current.match, imported(path))) for path in sources()}


def test_imports_go_down():
    edges = [(name, target) for name, targets in graph().items() for target in targets]
    up = [f"{name} imports {target}" for name, target in edges if level(target) > level(name)]
    assert not up


def test_no_modules_import_each_other_in_a_circle():
    # static_order raises a CycleError that names the circle
    order = list(TopologicalSorter({name: graph()[name] - {name} for name in graph()}).static_order())
    assert len(order) >= len(graph())


def test_kernels_are_chosen_in_one_place():
    # ops chooses, a benchmark measures, and doctor asks for, what lies there
    may = ("sigma0.kernels", "sigma0.bench", "sigma0.decode.ops", "sigma0.commands.doctor")
    others = [name for name in graph() if not name.startswith(may)]
    assert not {name for name in others if any(target.startswith("sigma0.kernels") for target in graph()[name])}


def test_imports_are_of_the_package_and_of_what_a_module_may_know():
    light = ("config", "cpp_compiler", "errors", "jsonl", "lazy", "serve.engine.scheduler")
    for path in set(sources()):
        name = module_name(path)
        outside = {target.split(".")[0] for target in imported(path)} - {"sigma0"}
        assert not outside & {*LINKS}, f"{name} imports past the package"
        if name.startswith("sigma0.kernels") and path.name != "__main__.py":
            assert outside - set(sys.stdlib_module_names) <= {"torch", "triton"}, name
        if name == "sigma0" or name.removeprefix("sigma0.") in light:
            assert "torch" not in outside, name


@pytest.mark.cpu(6)
def test_kernels_ask_no_number_for_a_dtype():
    # a launch makes a constant of a 1, and before Triton 3.9 a constant has no `to`
    for path in set(sources()):
        for kernel in ast.walk(ast.parse(path.read_text())):
            if isinstance(kernel, ast.FunctionDef) and kernel.name.endswith("_kernel"):
                given = {arg.arg for arg in kernel.args.args}
                asked = [node.value for node in ast.walk(kernel) if getattr(node, "attr", "") == "to"]
                assert not {node.id for node in asked if isinstance(node, ast.Name)} & given, f"{path}: {kernel.name}"


def test_words_that_a_reader_has_to_guess_do_not_come_back():
    texts = [*set(sources()), *ROOT.glob("*.md"), *(ROOT / "sigma0").glob("**/*.md")]
    assert not [path for path in texts if "parted by" in path.read_text()], "separated by, comma-separated"
    # toy.py holds the text of a repository that rows were measured on
    vague = "(?:found|told|each|own|behind|which)"
    name = re.compile(rf"^ +{vague}(?:, \w+)* = |\bfor (?:\w+, )*{vague}(?:, \w+)* in ", re.MULTILINE)
    assert not [path for path in sources() if path.name != "toy.py" and name.search(path.read_text())], "say what it is"


def test_files_stay_short():
    for path in set(sources()):
        assert len(path.read_text().splitlines()) <= 500, path


def test_symlinks_are_relative_and_have_no_init():
    for name in LINKS:
        link = ROOT / "sigma0" / name
        assert link.is_symlink()
        assert not link.readlink().is_absolute()
        assert not (link / "__init__.py").exists()
        assert (link / "README.md").is_file()


def test_every_package_is_listed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    files = [path for folder in ("", *LINKS) for path in (ROOT / "sigma0" / folder).glob("**/*") if path.is_file()]
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in files if "__pycache__" not in path.parts}
    # of C++ a wheel holds the library alone, which is not listed
    data = ("results", "results.quick", "retrofit.pilots")
    others = {"sigma0.kernels.cpu", *(f"sigma0.bench.{name}" for name in data)}
    assert sorted(listed) == sorted(folders - others)


@pytest.mark.slow
def test_the_wheel_holds_sigma0_and_nothing_else(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(tmp_path), str(ROOT)]
    # without a compiler, which would take most of the time
    subprocess.run(command, check=True, cwd=tmp_path, env={**os.environ, "CC": "false", "CXX": "false"})
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"sigma0"}
    pages = [f"{folder}/README.md" for folder in LINKS]
    for name in ("py.typed", *pages, "bench/pocket/world.py", "models/ouro.py"):
        assert f"sigma0/{name}" in names, name
    files = zipfile.ZipFile(wheel).infolist()
    limits = {"pocket": 8, "pocket-large": 24, "pocket-raven": 2, "pocket-solver": 2}
    assert set(sigma0.shipped_models()) <= set(limits)
    for model in sigma0.shipped_models():
        folder = f"sigma0/checkpoints/{model}/"
        for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"):
            assert f"{folder}{name}" in names, f"{folder}{name}"
        assert sum(info.file_size for info in files if info.filename.startswith(folder)) <= limits[model] * 2**20
