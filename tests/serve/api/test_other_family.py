"""A family without a gate, behind a chat template of its own, over HTTP."""

import copy

import openai
import pytest

import sigma0
from tests.reference import tiny_nanbeige
from tests.serve.conftest import served

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is Mary?"}]
TEMPLATE = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}[assistant]"


def test_its_own_template_is_served_and_a_gate_is_refused(pocket):
    tokenizer = copy.deepcopy(pocket[1])
    tokenizer.chat_template = TEMPLATE
    model = tiny_nanbeige(12, vocab_size=len(tokenizer), max_position_embeddings=512)
    exits = {"mode": "margin", "theta": 0.3}
    expected = sigma0.generate(model, tokenizer, MESSAGES, max_new_tokens=9, exit_config=exits)
    as_text = "[system] Be brief.\n[user] Where is Mary?\n[assistant]"
    assert expected.text == sigma0.generate(model, tokenizer, as_text, max_new_tokens=9, exit_config=exits).text
    with served((model, tokenizer)) as server:

        def ask(**sigma):
            return server.client.chat.completions.create(
                model="pocket", messages=MESSAGES, max_tokens=9, temperature=0, extra_body={"sigma0": sigma}
            )

        answer = ask(exit=exits)
        assert answer.choices[0].message.content == expected.text
        assert answer.usage.prompt_tokens == len(tokenizer(as_text)["input_ids"])
        with pytest.raises(openai.BadRequestError, match="reads a gate, which nanbeige models do not have"):
            ask(exit={"q": 0.5})
