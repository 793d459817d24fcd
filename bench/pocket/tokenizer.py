"""The tokenizer of the micro-world: byte-level BPE in which nearly every word of the world is one token."""

from collections.abc import Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sigma0.bench.pocket.world import draw

# The ids that Ouro's own checkpoints mean: pad 0, bos 1, eos 2.
PAD, BOS, EOS = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MAX_VOCABULARY = 1024
MAX_LENGTH = 2048

CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\nTools:' }}{% for tool in tools %}"
    "{{ ' ' + tool['function']['name'] }}"
    "{{ '(' + (tool['function']['parameters']['properties'] or {}) | join(', ') + ')' }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<|im_start|>user\\n<tool_response>\\n' + message['content'] + '\\n</tool_response><|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}{{ '' if loop.first and not message['content'] else '\\n' }}"
    "{{ '<tool_call>\\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{ call['function']['arguments'] | tojson }}{{ '}\\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_SCENES = 3000
_ROLES = "system\nuser\nassistant\n"


def build_tokenizer(seed: int = 0) -> PreTrainedTokenizerFast:
    """Train the tokenizer on train-split text; the same seed gives the same tokenizer.

    Digits are split one by one, any UTF-8 text round-trips, and no token is added on plain encoding.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCABULARY,
        min_frequency=2,
        show_progress=False,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_texts(seed), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def _texts(seed: int) -> Iterator[str]:
    """Yield every form a word can take: after a space, and at the start of a text or turn."""
    for index in range(_SCENES):
        scene = draw("train", seed, index)
        yield scene.story
        for item in scene.items:
            yield item.question
            yield f" {item.question} {item.answer}"
            yield item.answer
    for _ in range(_SCENES):
        yield _ROLES
