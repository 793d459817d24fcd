import pytest
import torch

import sigma0
from sigma0.bench.humaneval.sampling import STOPS, Sample, SampleSettings, sample_seed, truncate_at_stop, write_sample
from tests.bench.humaneval.examples import DOUBLE, PROBLEMS
from tests.reference import tiny_llama

STORY = DOUBLE.model_copy(update={"prompt": "Mary is in the kitchen. Where is Mary?"})


def settings(model=None, **changes):
    exits = None if model is None else model.resolve_exit_config(changes.pop("exit_config", None)).to_dict()
    return SampleSettings(**({"exit_config": exits, "dtype": "float32", "max_new_tokens": 12} | changes))


@pytest.fixture(scope="module")
def plain(pocket):
    """A small random model without loops, that reads what `pocket` reads."""
    return tiny_llama(seed=0, vocab_size=len(pocket[1]), max_position_embeddings=64)


def test_each_sample_has_a_seed_of_its_own():
    seeds = {sample_seed(seed, problem, n) for seed in (0, 1) for problem in PROBLEMS for n in range(50)}
    assert len(seeds) == 200 and all(0 <= seed < 2**32 for seed in seeds)


def test_a_looped_model_continues_the_prompt_as_it_is(pocket):
    result = write_sample(*pocket, STORY, 0, settings(pocket[0]))
    written = sigma0.generate(*pocket, STORY.prompt, max_new_tokens=12, do_sample=False)
    assert result.completion == written.text and result.new_tokens == len(written.tokens)
    assert result.depths == sum(token.depth for token in written.tokens[1:])
    assert (result.passes, result.rows) == (written.loop_passes, written.loop_rows)
    assert result.finished == (written.stop_reason != "length")


def test_white_space_at_the_end_of_a_prompt_is_left_to_the_model_where_it_is_asked(pocket):
    spaced = STORY.model_copy(update={"prompt": f"{STORY.prompt}\n  \n"})
    plain, stripped = (write_sample(*pocket, spaced, 0, settings(pocket[0], strip_prompt=strip)) for strip in (0, 1))
    bare = write_sample(*pocket, STORY, 0, settings(pocket[0]))
    assert stripped.completion == bare.completion != plain.completion


def test_stop_strings_end_a_text_and_are_cut_off(pocket):
    whole = write_sample(*pocket, STORY, 0, settings(pocket[0], stop=()))
    place = whole.completion.index(" ", 3)
    result = write_sample(*pocket, STORY, 0, settings(pocket[0], stop=(whole.completion[place : place + 3],)))
    assert result.completion == whole.completion[:place] and result.finished
    assert result.new_tokens < whole.new_tokens


@pytest.mark.parametrize("kind", ["looped", "plain"])
def test_samples_differ_by_number_and_come_back_by_it(kind, pocket, plain):
    model, tokenizer = (pocket[0] if kind == "looped" else plain), pocket[1]
    drawn = settings(model if kind == "looped" else None, temperature=1.5)
    state = torch.random.get_rng_state()
    first = [write_sample(model, tokenizer, STORY, number, drawn).completion for number in range(4)]
    again = [write_sample(model, tokenizer, STORY, number, drawn).completion for number in (3, 2, 1, 0)]
    assert first == again[::-1] and len(set(first)) > 1
    assert torch.equal(state, torch.random.get_rng_state()), "the caller's own generator moved"


def test_a_model_without_loops_tells_no_depths(pocket, plain):
    result = write_sample(plain, pocket[1], STORY, 0, settings())
    assert (result.depths, result.passes, result.rows) == (None, None, None)
    ids = pocket[1](STORY.prompt, return_tensors="pt")["input_ids"]
    new = plain.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert result.completion == truncate_at_stop(pocket[1].decode(new, skip_special_tokens=True), STOPS)
    assert result.new_tokens <= 12


def test_a_prompt_that_does_not_fit_is_named(pocket, plain):
    with pytest.raises(ValueError, match=r"Test/0: a prompt of .* exceed the model's context of 64"):
        write_sample(plain, pocket[1], DOUBLE, 0, settings(max_new_tokens=60))


def test_a_sample_knows_all_of_its_loops_or_none():
    values = {"task_id": "a", "problem_sha256": "b", "number": 0, "completion": "", "finished": True, "new_tokens": 2}
    assert Sample(**values, seconds=1.0, depths=3, passes=3, rows=4).passes == 3
    with pytest.raises(ValueError, match="all known or all unknown"):
        Sample(**values, seconds=1.0, depths=3)
