"""Tokens of a ladder: each rung by its own settings, with the same random numbers."""

import copy

import pytest
import torch

from sigma0.ladder.token_sampler import TokenSampler, samplers_for

CPU = torch.device("cpu")
IDS = torch.tensor([3, 5, 5, 7])
LOGITS = torch.randn(50, generator=torch.Generator().manual_seed(0)) * 2


def draws(sampler, number=400, sequence=0):
    """Tokens at many positions, each with a number of its own."""
    return [sampler.sample(IDS.repeat(1 + k)[: 4 + k], LOGITS, sequence) for k in range(number)]


def test_greedy_is_the_argmax_and_draws_have_the_probabilities_of_the_logits():
    greedy = TokenSampler(CPU, 1)
    assert greedy.is_greedy and greedy.sample(IDS, LOGITS, 0) == int(LOGITS.argmax())
    raised = LOGITS.clone()
    raised[5] = LOGITS.max() + 1
    assert greedy.sample(IDS, raised, 0) == 5
    penalised = TokenSampler(CPU, 1, repetition_penalty=5.0)
    assert not penalised.is_greedy and penalised.sample(IDS, raised, 0) == int(LOGITS.argmax())
    drawn = torch.tensor(draws(TokenSampler(CPU, 1, [3], temperature=0.7), 3000)).bincount(minlength=50) / 3000
    expected = torch.softmax(LOGITS / 0.7, 0)
    # five standard deviations of the likeliest
    assert (drawn - expected).abs().max() < 5 * (0.25 / 3000) ** 0.5
    assert (drawn[expected > 0.02] > 0).all()
    first, second = TokenSampler(CPU, 2, [3, 4]), TokenSampler(CPU, 2, [3, 4])
    assert draws(first, 40) == draws(second, 40) != draws(first, 40, sequence=1)
    assert draws(first, 40, sequence=1) == draws(TokenSampler(CPU, 1, [4]), 40)


@pytest.mark.parametrize(
    "settings", [{"top_k": 3}, {"top_p": 0.4}, {"min_p": 0.3}, {"top_k": 1}, {"temperature": 0.01}]
)
def test_only_what_is_likely_enough_is_drawn(settings):
    probs = torch.softmax(LOGITS / settings.get("temperature", 1.0), 0)
    order = probs.argsort(descending=True)
    before = probs[order].cumsum(0) - probs[order]
    kept = {
        "top_k": order[: settings.get("top_k", 50)],
        "top_p": order[before < settings.get("top_p", 1.0)],
        "min_p": order[probs[order] >= settings.get("min_p", 0.0) * probs.max()],
        "temperature": order[probs[order] > 1e-6],
    }
    (name,) = settings
    assert set(draws(TokenSampler(CPU, 1, [3], **settings))) == set(kept[name].tolist())


def test_each_model_samples_by_its_own_settings(looped):
    small, large = (copy.copy(model) for model in looped)
    small.generation_config, large.generation_config = (copy.deepcopy(model.generation_config) for model in looped)
    small.generation_config.top_k = 1
    large.generation_config.top_k = large.generation_config.temperature = None
    drawing = samplers_for([small, large], 2, do_sample=True, seed=9)
    assert set(draws(drawing[0])) == {int(LOGITS.argmax())} and len(set(draws(drawing[1]))) > 5
    assert draws(drawing[1], 40, sequence=1) == draws(TokenSampler(CPU, 1, [10]), 40)
    # what is given counts for all
    assert {len(set(draws(item))) for item in samplers_for([small, large], 1, True, 9, top_k=2)} == {2}
    # settings of draws say nothing of an argmax
    assert all(item.is_greedy for item in samplers_for([small, large], 1))
    torch.manual_seed(0)
    once, again = samplers_for([large], 1, True)[0], samplers_for([large], 1, True)[0]
    assert draws(once, 40) != draws(again, 40), "without a seed each run draws one"


def test_what_single_tokens_cannot_have_is_refused(looped):
    model = copy.copy(looped[0])
    for name, value in (("no_repeat_ngram_size", 2), ("min_length", 1), ("num_beams", 2), ("guidance_scale", 1.5)):
        model.generation_config = copy.deepcopy(looped[0].generation_config)
        setattr(model.generation_config, name, value)
        with pytest.raises(ValueError, match=f"sets {name}={value}"):
            samplers_for([model], 1)
    with pytest.raises(TypeError):
        samplers_for([looped[0]], 1, beams=3)
