"""Small random models whose tokenizer has a token for each byte, so that they can spell any text."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.reference import settled_model

END = 256


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Ids are bytes in the order of the byte-level alphabet; `<|end|>` ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: item for item, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")


def byte_model(seed: int = 0, **overrides):
    """A random model over these ids, whose readouts settle early, and its tokenizer."""
    settings = {"vocab_size": 260, "eos_token_id": END, "max_position_embeddings": 1024, "total_ut_steps": 4}
    model = settled_model(seed, **settings | overrides)
    model.generation_config.eos_token_id = END
    model.generation_config.pad_token_id = END
    return model, byte_tokenizer()
