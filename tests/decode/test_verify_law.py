"""Under `verify` drawn texts follow the law of full depth, however often their tokens are drawn anew on the way."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from sigma0 import ExitConfig
from tests.decode.test_random_numbers import deviation
from tests.marks import exhaustive, slow
from tests.models.raven_reference import tiny_raven
from tests.reference import tiny_model

FULL = ExitConfig(mode="full")
FIRST = ExitConfig(mode="fixed", depth=1, after_exit="verify")
TEMPERATURE, PROMPT, EOS = 0.3, (1, 4, 2), 3


@pytest.fixture(scope="module")
def small():
    """Loops that disagree: about two drafts in five are drawn anew before loop T."""
    model = tiny_model(
        seed=5, vocab_size=6, total_ut_steps=4, num_hidden_layers=1, hidden_size=16, intermediate_size=16
    )
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm_2.weight.fill_(1.5)
            layer.post_attention_layernorm_2.weight.fill_(1.5)
    return model


def run(model, ids, config, **kwargs):
    return model.generate(
        ids,
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=0,
        exit_config=config,
        return_dict_in_generate=True,
        **{"attention_mask": torch.ones_like(ids), "eos_token_id": None, "max_new_tokens": 3} | kwargs,
    )


def joint_law(model, config, draws, eos=None, company=False):
    """How often each text of three tokens is drawn after the prompt."""
    torch.manual_seed(0)
    ids, mask = torch.tensor([PROMPT]).expand(500, -1), torch.ones(500, len(PROMPT), dtype=torch.int64)
    if company:  # every other row is a longer prompt, and the rows that count are padded
        ids, mask = torch.tensor([[0, 0, *PROMPT], [3, 3, 1, 5, 2]]), torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
        ids, mask = ids.repeat(250, 1), mask.repeat(250, 1)
    counts = Counter()
    while counts.total() < draws:
        result = run(model, ids, config, attention_mask=mask, eos_token_id=eos)
        texts = result.sequences[:: 2 if company else 1, ids.shape[1] :].tolist()
        counts.update(tuple(cut(text, eos)) for text in texts)
    return counts


def cut(text, eos):
    return text[: text.index(eos) + 1] if eos in text else text


def exact_law(model, eos=None):
    """Probability of every text, from full depth in float64."""
    law = Counter()
    for text in np.ndindex(*(model.config.vocab_size,) * 3):
        ids = torch.tensor([[*PROMPT, *text]])
        with torch.no_grad():
            logits = model(ids, exit_config=FULL).logits[0, len(PROMPT) - 1 : -1].double() / TEMPERATURE
        probs = torch.softmax(logits, -1)
        kept = cut(list(text), eos)
        # Texts that share a beginning up to its end add up to the chance of that beginning.
        law[tuple(kept)] += float(torch.stack([probs[index, token] for index, token in enumerate(text)]).prod())
    return law


@pytest.mark.parametrize(
    "config, eos, company, draws",
    [
        slow(ExitConfig(mode="converge", eps=0.6, after_exit="verify"), None, "raven", 4_000),
        slow(FIRST, None, False, 4_000),
        exhaustive(FIRST, None, False, 20_000),
        exhaustive(replace(FIRST, redraft=False), None, False, 20_000),
        exhaustive(ExitConfig(q=0.6, after_exit="verify"), EOS, False, 20_000),
        exhaustive(ExitConfig(mode="margin", theta=0.3, after_exit="verify"), EOS, True, 20_000),
    ],
    ids=["raven", "fixed, few draws", "fixed", "one draft", "qexit with an end", "margin in company"],
)
def test_drawn_texts_follow_the_law_of_full_depth(small, config, eos, company, draws):
    if company == "raven":
        small, company = tiny_raven("pre", 39, vocab_size=6, n_layers_in_coda=1), False
    law, counts = exact_law(small, eos), joint_law(small, config, draws, eos, company)
    assert sum(law.values()) == pytest.approx(1.0)
    assert abs(deviation(*(torch.tensor([item[text] for text in law]) for item in (counts, law)))) < 4


def test_draws_do_not_depend_on_the_company(small):
    config = ExitConfig(q=0.6, after_exit="verify")
    texts = []
    for company in ([[1, 2, 3]], [[1, 2, 3], [5, 4, 0]], [[1, 2, 3], [0, 0, 1], [2, 2, 2]]):
        torch.manual_seed(3)
        result = run(small, torch.tensor(company), config, max_new_tokens=10)
        texts.append(result.sequences[0].tolist())
    # The first sequence's generator is seeded from as many draws as there are sequences, the first of them its own.
    assert texts[0] == texts[1] == texts[2]
