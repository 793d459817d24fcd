"""What can be held of the plugin without vLLM: its names, and that importing it imports nothing heavy."""

import ast
import importlib
from importlib.metadata import entry_points
from pathlib import Path

import sigma0.models
from sigma0.serve.vllm.plugin import MODELS
from tests.test_start import loaded

FOLDER = Path(__file__).parents[3] / "serve" / "vllm"


def test_the_entry_point_is_the_plugin():
    (result,) = entry_points(group="vllm.general_plugins", name="sigma0")
    module, _, name = result.value.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_each_architecture_is_one_of_ours_and_a_class_of_the_file_that_is_named():
    for architecture, path in MODELS.items():
        assert architecture in sigma0.models.__all__
        module, _, name = path.partition(":")
        file = FOLDER / f"{module.rpartition('.')[2]}.py"
        classes = [node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef)]
        assert name == architecture and name in classes


def test_importing_the_plugin_is_light():
    assert not {"torch", "vllm", "transformers"} & loaded("import sigma0.serve.vllm.plugin")
