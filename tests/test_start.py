"""What is imported when: the command line's help and `import sigma0` need neither torch nor transformers."""

import ast
import inspect
import json
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import typer

import sigma0
import sigma0.reason
from sigma0.bench.commands import COMMANDS as BENCHES
from sigma0.cli import COMMANDS
from sigma0.presence import has_driver
from tests.marks import exhaustive, slow
from tests.test_cli import run

ROOT = Path(__file__).parent.parent
HEAVY = {"torch", "transformers", "tokenizers", "huggingface_hub", "numpy", "fastapi", "uvicorn", "openai"}
# What the list of commands needs of sigma0.
PARTS = ("cli", "commands", "commands.console", "commands.lazy_group", "errors", "lazy", "registration")
FRAME = {"sigma0", *(f"sigma0.{name}" for name in PARTS)}
# What only a command that runs needs: the settings, the model, and the messages of the server.
RUNTIME = ("api", "calibrate", "config", "decode", "ladder", "models", "reason", "signals")
RUNTIME_PACKAGES = tuple(f"sigma0.{name}" for name in (*RUNTIME, "serve.api", "serve.cluster", "serve.engine"))
COMMAND = """
import sys
from sigma0.cli import app
try:
    app(sys.argv[1:], prog_name="sigma0")
except SystemExit as end:
    assert not end.code
"""


def loaded(code, *arguments):
    """Names of the modules that a new interpreter has imported at the end of a program."""
    program = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    command = [sys.executable, "-c", program, *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(json.loads(result.stderr.splitlines()[-1]))


def tops(modules):
    return {name.partition(".")[0] for name in modules}


def ours(modules):
    return {name for name in modules if name.partition(".")[0] == "sigma0"}


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_the_list_of_commands_imports_no_command(option):
    modules = loaded(COMMAND, option)
    assert ours(modules) == FRAME
    assert not tops(modules) & HEAVY
    # typer and rich, and what they need of the standard library; torch and transformers bring more than 2,000
    assert len(modules) < 1000


@pytest.mark.grid(fast=3, slow=1)
@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_imports_nothing_that_runs_it(name):
    modules = loaded(COMMAND, name, "--help")
    assert COMMANDS[name].module in modules
    assert not {module for module in modules if module.startswith(RUNTIME_PACKAGES)}
    assert not tops(modules) & HEAVY


def test_the_list_of_benchmarks_imports_no_benchmark():
    modules = loaded(COMMAND.replace("sigma0.cli", "sigma0.bench.commands"), "--help")
    assert not tops(modules) & HEAVY
    assert {name for name in modules if name.startswith("sigma0.bench.")} == {"sigma0.bench.commands"}


@pytest.mark.parametrize("target", [*COMMANDS.values(), *BENCHES.values()], ids=lambda target: target.name)
def test_listed_help_is_the_commands_own(target):
    defined = getattr(import_module(target.module), target.name)
    text = defined.info.help if isinstance(defined, typer.Typer) else inspect.getdoc(defined)
    assert text.partition("\n\n")[0].replace("\n", " ") == target.help


def test_doctor_imports_torch_only_to_ask_it_for_a_gpu():
    modules = loaded(COMMAND, "doctor")
    assert "transformers" not in modules
    assert ("torch" in modules) == has_driver(vars(torch.version))
    assert not has_driver({"cuda": None, "hip": None})
    assert has_driver({"cuda": None, "hip": "7.0"})


def test_the_version_is_that_of_the_package_and_an_unknown_command_is_told_the_nearest():
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"sigma0 {sigma0.__version__}\n")
    result = run("generat")
    assert result.exit_code == 2 and "generate" in result.stderr


@pytest.mark.parametrize(
    "code, heavy",
    [
        ("import sigma0\nassert sigma0.shipped_models() and sigma0.ExitConfig() and dir(sigma0)", HEAVY),
        ("from sigma0.reason.sandbox.sandbox import Sandbox", HEAVY),
        slow(
            "import sigma0.serve.api.app, sigma0.serve.engine.process",
            {"transformers.modeling_utils", "transformers.generation.utils", "torch._dynamo"},
        ),
        slow(
            "import sigma0\nassert sigma0.decode.ops.FATES and sigma0.signals.canary and sigma0.models.OuroConfig",
            set(),
        ),
    ],
    ids=["sigma0", "the sandbox", "the front of a server", "parts after a plain import"],
)
def test_what_is_imported_alone_brings_no_model(code, heavy):
    modules = loaded(code)
    assert not (modules | tops(modules)) & heavy


# As the console script runs it; what is printed after this comes before `run` ends the process.
RUN = COMMAND.replace("import app", "import run").replace('app(sys.argv[1:], prog_name="sigma0")', "run()")
PROMPT = "Mary went to the park. Where is Mary?"
# What others than `generate` with one model need. transformers imports scipy, sklearn and accelerate where they are.
OTHERS = {
    "datasets", "fastapi", "llguidance", "matplotlib", "openai", "pandas", "prometheus_client",
    "prompt_toolkit", "ray", "torchao", "uvicorn",
}  # fmt: skip
OTHER_PARTS = ("bench", "calibrate", "ladder", "models.auto", "models.nanbeige", "models.raven", "reason", "serve")


@pytest.mark.cpu(12)
def test_generate_imports_no_other_family_and_no_library_of_another_command():
    modules = loaded(RUN, "generate", PROMPT, "--max-new-tokens", "2")
    assert "sigma0.models.ouro" in modules
    assert not {name for name in modules if name.startswith(tuple(f"sigma0.{part}" for part in OTHER_PARTS))}
    assert not tops(modules) & OTHERS


def test_the_collector_rests_until_what_is_needed_is_loaded():
    code = """
import gc, sys
from sigma0.cli import run
from sigma0.commands.console import loading
def check():
    assert not gc.isenabled()
    with loading("it"):
        pass
    assert gc.isenabled() and gc.get_freeze_count()
sys.argv[1:] = ["--version"]
try:
    run()
except SystemExit:
    check()
"""
    assert "torch" not in loaded(code)


@pytest.mark.slow
def test_kernels_import_triton_where_they_can_run():
    # of what imports them, transformers would import it too: torch's compiler does, where it is there
    code = "import sigma0.decode.ops"
    assert ("triton" in loaded(code)) <= has_driver(vars(torch.version))
    if find_spec("triton") is not None:
        assert "triton" in loaded(f"import os; os.environ['TRITON_INTERPRET'] = '1'; {code}")


@pytest.mark.parametrize(
    "arguments",
    [
        ("size", "pocket"), ("size", "ouro-2.6b"), ("size", "huginn-0125"), ("size", "nanbeige4.2-3b"),
        ("size", "nosuch"), ("generate", PROMPT, "--model", "nosuch"), ("generate", PROMPT, "--model", "no.gguf"),
        ("chat", "nosuch"), ("serve", "nosuch"), ("solve", "1 + 1", "--model", "nosuch"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_size_or_an_unknown_model_needs_no_torch(arguments):
    code = COMMAND.replace("assert not end.code", "assert end.code in (None, 0, 2)")
    assert not tops(loaded(code, *arguments)) & HEAVY


# Ends at the first sign on a terminal, and says whether torch had been imported by then.
FIRST_SIGN = """
import os, sys
class Screen:
    encoding = "utf-8"
    def isatty(self):
        return True
    def flush(self):
        pass
    def write(self, text):
        print(json.dumps([text, "torch" in sys.modules]), file=sys.__stderr__, flush=True)
        os._exit(0)
import json
sys.stderr = Screen()
from sigma0.cli import run
run()
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", PROMPT), ("generate", PROMPT, "--ladder", "pocket,pocket-large"), ("chat",), ("serve",),
        ("calibrate", "pocket", "--prompts", "nowhere"), ("solve", "1 + 1"), ("export", "pocket", "nowhere"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_is_being_loaded_is_on_the_screen_before_torch_is_imported(arguments):
    command = [sys.executable, "-c", FIRST_SIGN, *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    text, late = json.loads(result.stderr.splitlines()[-1])
    assert "loading pocket" in text and not late


@pytest.mark.parametrize("package", [sigma0, sigma0.reason], ids=lambda package: package.__name__)
def test_public_names_are_there_for_programs_editors_and_type_checkers(package):
    names = {}
    exec(f"from {package.__name__} import *", names)
    assert set(package.__all__) <= set(names) and set(package.__all__) <= set(dir(package))
    tree = ast.parse(Path(package.__file__).read_text())
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = {alias.name: node.module for node in checked.body for alias in node.names}
    (lazy,) = (node for node in ast.walk(tree) if isinstance(node, ast.Dict))
    modules = ast.literal_eval(lazy)
    assert {name: modules[name] for name in package.__all__} == {name: imports[name] for name in package.__all__}
    with pytest.raises(AttributeError, match=r"has no attribute 'nosuch'"):
        _ = package.nosuch


AUTO = "from transformers import AutoModelForCausalLM"
FIRST_IMPORTS = [
    f"import sigma0; {AUTO}",
    slow(f"{AUTO}; import sigma0"),
    # these load the table of configurations while classes that sigma0.models needs are not defined yet
    exhaustive("import sigma0; from transformers import PreTrainedModel"),
    exhaustive("import sigma0; from transformers.models.qwen3 import modeling_qwen3"),
    slow("import sigma0; from transformers import pipeline"),
    exhaustive("import sigma0.decode.kv_cache"),
    exhaustive("import sigma0.models.ouro_config"),
    exhaustive("from sigma0 import *"),
]


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize("imports", FIRST_IMPORTS)
def test_auto_classes_know_the_models_in_whichever_order_things_are_imported(imports):
    code = f"""
import sys
{imports}
{AUTO}
model = AutoModelForCausalLM.from_pretrained({str(ROOT / "sigma0" / "checkpoints" / "pocket")!r})
assert type(model).__module__ == "sigma0.models.ouro", type(model)
assert not any(type(finder).__module__ == "sigma0.registration" for finder in sys.meta_path)
"""
    loaded(code)


@pytest.mark.slow
def test_a_program_may_end_in_the_middle_of_a_stream():
    begin = "import sigma0\nmodel, tokenizer = sigma0.load('pocket')\n"
    program = f"{begin}for token in sigma0.stream(model, tokenizer, 'Mary went to the park. Where is Mary?'): break"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
