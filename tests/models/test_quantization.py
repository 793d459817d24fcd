"""Quantised weights: which ones, how closely, through every way of decoding; and quantised checkpoints."""

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import sigma0
from sigma0.checkpoints import CHECKPOINTS
from sigma0.cpp_compiler import compiler
from sigma0.decode import compiled as programs
from sigma0.models.quantization import RowKernelLinear, group_size, quantize, weight_bytes
from tests.reference import tiny_model
from tests.test_cli import run

pytest.importorskip("torchao")
pytestmark = pytest.mark.slow
PROJECTIONS = {f"self_attn.{name}_proj" for name in "qkvo"} | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
PROMPTS = ["Mary went to the park. The hat is with Mary. Where is the hat?", "Tom went to the barn. Where is Tom?"]


@pytest.fixture(scope="module", params=["int8", "int4"])
def quantized(request):
    return sigma0.load("pocket-large", device="cpu", quantization=request.param)


@pytest.fixture(scope="module")
def floats():
    return sigma0.load("pocket-large", device="cpu", dtype="bfloat16")[0]


@pytest.fixture
def folder(tmp_path):
    target = tmp_path / "copy"
    shutil.copytree(CHECKPOINTS / "pocket", target)
    return target


def set_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def rewrite(folder, change):
    path = folder / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata=metadata)


def rounded_of(module, floats):
    """The weight that products are of, in float64 `[out, in]`, and half a step of its rounding."""
    weight = module.weight
    if hasattr(weight, "scale"):
        return weight.qdata.double() * weight.scale.double(), weight.scale.double() / 2
    # packed as the kernel alone knows: read out by unit vectors
    rounded = module(torch.eye(floats.shape[1], dtype=torch.bfloat16)).T.double()
    groups = floats.double().unflatten(1, (-1, weight.block_size[1]))
    step = ((groups.amax(-1) - groups.amin(-1)) / 15)[..., None]
    # torchao rounds numbers of 8 bits
    return rounded, 1.2 * step.expand_as(groups).flatten(1) / 2


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_products_are_those_of_the_rounded_weights(quantized, floats, rows):
    torch.manual_seed(0)
    for name in sorted(PROJECTIONS):
        module = quantized[0].model.layers[0].get_submodule(name)
        current = floats.model.layers[0].get_submodule(name).weight.detach()
        rounded, half = rounded_of(module, current)
        # scales are of 8 bits too
        slack = 2**-7 * current.double().abs().amax(1, keepdim=True)
        assert ((rounded - current.double()).abs() <= half + slack).all(), name
        hidden = torch.randn(rows, current.shape[1], dtype=torch.bfloat16)
        exact = hidden.double() @ rounded.T
        product = module(hidden)
        assert product.dtype is torch.bfloat16 and type(module) is RowKernelLinear
        assert (product.double() - exact).abs().max() <= 0.01 * exact.abs().max(), name
        assert torch.equal(module(hidden[None])[0], product)


def test_the_block_is_quantised_and_nothing_else(quantized, floats):
    model, _ = quantized
    for name, parameter in model.named_parameters():
        of_block = any(f"layers.0.{projection}." in name for projection in PROJECTIONS)
        assert hasattr(parameter, "__tensor_flatten__") is of_block, name
        if not of_block:
            assert torch.equal(parameter, floats.get_parameter(name)), name
    share = {"int8": 0.53, "int4": 0.32}[model.quantization]
    assert weight_bytes(model.model.layers) < share * weight_bytes(floats.model.layers)


@pytest.mark.parametrize("after, code", [("finish", False), ("verify", False), ("drop", False), ("finish", True)])
def test_compiled_steps_write_what_eager_ones_write(quantized, monkeypatch, after, code):
    """As they are traced, and once as machine code."""
    if not code:
        monkeypatch.setattr(programs, "generate_code", lambda graph, examples: graph)
    elif compiler() is None or quantized[0].quantization == "int4":
        pytest.skip("a C++ compiler is needed, and one kind of weights is enough")
    model, tokenizer = quantized
    batch = tokenizer(PROMPTS, padding=True, return_tensors="pt")
    config = {"mode": "margin", "theta": 0.9, "after_exit": after}
    settings = {"max_new_tokens": 8, "exit_config": config, "return_dict_in_generate": True}
    for prompts in (batch, {name: part[:1] for name, part in batch.items()}):
        eager, compiled = (model.generate(**prompts, runner=runner, **settings) for runner in ("eager", "compile"))
        assert compiled.runner.name == "compile"
        assert torch.equal(compiled.sequences, eager.sequences)
        assert torch.equal(compiled.exit_depths, eager.exit_depths)


def test_verify_writes_the_text_of_full_depth():
    model, tokenizer = sigma0.load("pocket-large", device="cpu", dtype="float32", quantization="int8")
    assert model.dtype is torch.float32
    batch = tokenizer(PROMPTS, padding=True, return_tensors="pt")
    settings = [{"mode": "full"}, {"mode": "margin", "theta": 0.2, "after_exit": "verify"}]
    full, verified = (model.generate(**batch, max_new_tokens=8, exit_config=item) for item in settings)
    assert torch.equal(full, verified)


def test_int8_is_saved_and_loaded_again(tmp_path):
    model, tokenizer = sigma0.load("pocket", device="cpu", quantization="int8")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, _ = sigma0.load(str(tmp_path), device="cpu")
    assert type(again.model.layers[0].mlp.up_proj) is RowKernelLinear
    ids = torch.tensor([[5, 6, 7, 8]])
    # the kernel for several rows ends the process at other addresses, which files hold tensors at
    assert not any(weight.qdata.data_ptr() % 16 for weight in again.parameters() if hasattr(weight, "qdata"))
    assert torch.equal(model(ids).logits, again(ids).logits)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, weight in plain.named_parameters():
        if hasattr(weight, "dequantize") and hasattr(weight, "qdata"):
            assert torch.equal(weight.dequantize(), model.get_parameter(name).dequantize()), name
    with pytest.raises(ValueError, match=r"stored quantized \(torchao\): load it without quantization='int4'"):
        sigma0.load(str(tmp_path), device="cpu", quantization="int4")

    def spoil(tensors):
        tensors["model.layers.0.mlp.up_proj._weight_scale"][3] = torch.nan

    rewrite(tmp_path, spoil)
    with pytest.raises(ValueError, match=r"mlp\.up_proj\.weight holds 1 NaN"):
        sigma0.load(str(tmp_path), device="cpu")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_broken_weights_are_refused_before_they_are_rounded_away(folder, quantization, number):
    def spoil(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"][2, 5] = number

    rewrite(folder, spoil)
    with pytest.raises(ValueError, match=r"mlp\.up_proj\.weight holds"):
        sigma0.load(str(folder), device="cpu", quantization=quantization)
    assert sigma0.load(str(folder), device="cpu", quantization=quantization, check=False)


def test_groups_divide_every_row():
    assert group_size(sigma0.load("pocket-large", device="cpu")[0].config) == 32
    odd = tiny_model(0, hidden_size=40, intermediate_size=64)
    with pytest.raises(ValueError, match="widths that are multiples of 32, this model has hidden_size 40"):
        quantize(odd.bfloat16(), "int4")
    quantize(odd, "int8")
    assert type(odd.model.early_exit_gate) is nn.Linear and odd.quantization == "int8"


def test_without_torchao_the_extra_is_named(tmp_path):
    model, tokenizer = sigma0.load("pocket", device="cpu", quantization="int8")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    script = (
        "import sys; sys.modules['torchao'] = None\n"
        "import sigma0\n"
        "for name, settings in (('pocket', {'quantization': 'int4'}), (sys.argv[1], {})):\n"
        "    try: sigma0.load(name, device='cpu', **settings)\n"
        "    except ValueError as error: print(error)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    extra, stored = ended.stdout.splitlines()
    assert "pip install 'sigma0-lm[quantization]'" in extra
    assert "the checkpoint is stored quantized (torchao): No module named 'torchao" in stored


@pytest.mark.parametrize(
    "package, settings",
    [
        ("bitsandbytes", {"quant_method": "bitsandbytes", "load_in_8bit": True}),
        ("optimum", {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}),
        ("gptqmodel", {"quant_method": "awq", "bits": 4, "group_size": 32}),
        ("compressed_tensors", {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {}}),
        (None, {"quant_method": "foo"}),
        (None, {"bits": 4}),
    ],
)
def test_a_checkpoint_names_the_library_that_it_needs(folder, package, settings):
    method = settings.get("quant_method")
    message = rf"stored quantized \({method}\).*{str(package).replace('_', '.')}"
    if package is None:
        message = f"quant_method = {method!r}, which transformers does not know"
    elif find_spec(package):
        pytest.skip(f"{package} is installed")
    set_config(folder, quantization_config=settings)
    with pytest.raises(ValueError, match=message):
        sigma0.load(str(folder), device="cpu")


@pytest.mark.parametrize(
    "name, quantizer, message",
    [
        ("model.layers.0.mlp.up_proj.weight", None, "a quantized checkpoint has a quantization_config"),
        ("model.norm.weight", {"quant_method": "bitsandbytes", "load_in_8bit": True}, "no quantizer .* stores it so"),
        ("model.early_exit_gate.weight", {"quant_method": "gptq", "bits": 4}, "no quantizer .* stores it so"),
    ],
)
def test_integers_stand_only_where_a_quantizer_puts_them(folder, name, quantizer, message):
    def to_integers(tensors):
        tensors[name] = tensors[name].to(torch.int8)

    rewrite(folder, to_integers)
    if quantizer is not None:
        set_config(folder, quantization_config=quantizer)
    with pytest.raises(ValueError, match=rf"{name} is stored as I8.*{message}"):
        sigma0.load(str(folder), device="cpu")


def test_a_quantised_checkpoint_is_not_unpickled(folder):
    model, _ = sigma0.load("pocket", device="cpu", quantization="int8")
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="could not be loaded"):
        sigma0.load(str(folder), device="cpu")


def test_generate_takes_it():
    result = run("generate", PROMPTS[0], "--quantization", "int8", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    assert "park" in json.loads(result.stdout)["text"]
