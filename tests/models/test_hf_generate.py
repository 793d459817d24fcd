"""What transformers' generate offers, at adaptive depth."""

import functools
import itertools
from unittest.mock import Mock, call

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
)
from transformers.generation import GenerationMixin
from transformers.generation.streamers import BaseStreamer

import sigma0.models.looped_causal as looped_causal
from sigma0 import DepthCache, ExitConfig
from sigma0.models import OuroForCausalLM
from tests.reference import tiny_llama, tiny_model

CONFIGS = [
    ExitConfig(mode="full"),
    ExitConfig(mode="fixed", depth=2),
    ExitConfig(q=0.6),
    ExitConfig(mode="converge", eps=0.6),
    ExitConfig(mode="accel", eps=0.9, patience=1),
    ExitConfig(mode="margin", theta=0.3),
    ExitConfig(q=0.6, after_exit="drop"),
]
PROMPTS = torch.tensor([[0, 0, 7, 8], [9, 10, 11, 12], [0, 13, 14, 15]])
MASK = (PROMPTS > 0).long()
SETTINGS = {"max_new_tokens": 10, "do_sample": False, "return_dict_in_generate": True}

each_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.mode}-{config.after_exit}")


@pytest.fixture(scope="module")
def model():
    return tiny_model(seed=1, total_ut_steps=4)


class Recorder(LogitsProcessor):
    """Changes nothing, and keeps the shapes that it saw."""

    def __init__(self):
        self.shapes = []

    def __call__(self, input_ids, scores):
        self.shapes.append((tuple(input_ids.shape), tuple(scores.shape)))
        return scores


class StopAfter(StoppingCriteria):
    """Ends row r once it holds 5 + r ids: a criterion bound to the batch, as lm-eval's is."""

    def __init__(self):
        self.shapes = []

    def __call__(self, input_ids, scores, **kwargs):
        self.shapes.append(tuple(input_ids.shape))
        return torch.tensor([input_ids.shape[1] >= 5 + row for row in range(len(input_ids))])


@each_config
def test_built_in_processors_agree_with_the_stock_loop(model, config, monkeypatch):
    settings = SETTINGS | {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "min_new_tokens": 3}
    settings |= {"bad_words_ids": [[3], [4, 5]], "eos_token_id": [6, 20, 21], "pad_token_id": 0}
    settings |= {"output_scores": True, "output_logits": True}
    ours = model.generate(PROMPTS, attention_mask=MASK, exit_config=config, **settings)
    monkeypatch.setattr(OuroForCausalLM, "_sample", GenerationMixin._sample)
    stock = model.generate(PROMPTS, attention_mask=MASK, exit_config=config, **settings)
    assert torch.equal(ours.sequences, stock.sequences)
    ended = torch.zeros(len(PROMPTS), dtype=torch.bool)
    for step, tokens in enumerate(ours.sequences[:, PROMPTS.shape[1] :].T):
        torch.testing.assert_close(ours.scores[step][~ended], stock.scores[step][~ended], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.logits[step][~ended], stock.logits[step][~ended], rtol=1e-4, atol=1e-4)
        assert ((ours.exit_depths[:, step] == 0) == ended).all()
        ended |= torch.isin(tokens, torch.tensor([6, 20, 21]))


@each_config
def test_unknown_processors_and_criteria_see_the_whole_batch(model, config):
    settings = SETTINGS | {"exit_config": config}
    plain = model.generate(PROMPTS, attention_mask=MASK, **settings)
    recorder, stop = Recorder(), StopAfter()
    watching = {"logits_processor": LogitsProcessorList([recorder]), "stopping_criteria": [stop]}
    watched = model.generate(PROMPTS, attention_mask=MASK, **watching, **settings)
    assert recorder.shapes == [((3, 4 + step), (3, model.config.vocab_size)) for step in range(3)]
    assert stop.shapes == [(3, 5 + step) for step in range(3)]
    assert [len(reasons) for reasons in watched.exit_reasons] == [1, 2, 3]
    for row, length in enumerate((5, 6, 7)):
        assert torch.equal(watched.sequences[row, :length], plain.sequences[row, :length])
        assert torch.equal(watched.exit_depths[row, : length - 4], plain.exit_depths[row, : length - 4])
        assert not watched.exit_depths[row, length - 4 :].any()
    # one sequence stays in the wave
    alone = model.generate(PROMPTS[1:2], logits_processor=LogitsProcessorList([Recorder()]), **settings)
    assert alone.loop_passes == int(alone.exit_depths[0, 1:].sum())


@pytest.mark.parametrize("rows", [slice(1, 2), slice(0, 3)])
def test_a_streamer_gets_whole_steps(model, rows):
    streamer = Mock(BaseStreamer)
    settings = SETTINGS | {"exit_config": ExitConfig(q=0.6), "attention_mask": MASK[rows]}
    outputs = model.generate(PROMPTS[rows], streamer=streamer, **settings)
    assert streamer.method_calls[-1] == call.end()
    values = [given.args[0].tolist() for given in streamer.put.call_args_list]
    assert values == [PROMPTS[rows].tolist(), *outputs.sequences[:, 4:].T.tolist()]


def test_prompt_as_embeddings(model):
    settings = {key: value for key, value in SETTINGS.items() if key != "return_dict_in_generate"}
    embeds = model.get_input_embeddings()(PROMPTS[1:2])
    from_embeds = model.generate(inputs_embeds=embeds, exit_config=ExitConfig(q=0.6), **settings)
    from_ids = model.generate(PROMPTS[1:2], exit_config=ExitConfig(q=0.6), **settings)
    assert torch.equal(from_embeds, from_ids[:, 4:])


def test_beam_search_at_full_depth_finds_the_best_pair():
    model = tiny_model(seed=2, vocab_size=11)
    prompt = torch.tensor([[3, 4, 5]])
    outputs = model.generate(prompt, num_beams=11, max_new_tokens=2, length_penalty=0.0, exit_config={"mode": "full"})
    pairs = torch.tensor(list(itertools.product(range(11), repeat=2)))
    with torch.no_grad():
        logits = model(torch.cat([prompt.expand(121, -1), pairs], 1), exit_config={"mode": "full"}).logits
    scores = torch.log_softmax(logits[:, 2:4], -1).gather(2, pairs[:, :, None]).sum((1, 2))
    assert outputs[0, 3:].tolist() == pairs[scores.argmax()].tolist()


@pytest.mark.parametrize("config", [ExitConfig(mode="full"), ExitConfig(q=1.0)])
def test_assisted_generation_equals_greedy_at_full_depth(model, config, monkeypatch):
    """With an assistant that leaves early by its own rule, an ordinary one, and none."""
    looped, depths = tiny_model(seed=9, total_ut_steps=5), []
    looped.generation_config.exit_config = {"q": 0.4}
    forward = looped.forward

    @functools.wraps(forward)
    def spy(*args, **kwargs):
        outputs = forward(*args, **kwargs)
        depths.append(int(outputs.exit_depths[0, -1]))
        return outputs

    monkeypatch.setattr(looped, "forward", spy)
    ordinary = tiny_llama(0, 61)
    settings = {"max_new_tokens": 10, "do_sample": False, "exit_config": config}
    greedy = model.generate(PROMPTS[1:2], **settings | {"exit_config": {"mode": "full"}})
    for assisted in ({"assistant_model": looped}, {"assistant_model": ordinary}, {"prompt_lookup_num_tokens": 2}):
        assert torch.equal(model.generate(PROMPTS[1:2], **assisted, **settings), greedy)
    assert min(depths) < 5
    with pytest.raises(ValueError, match="needs an empty cache"):
        model.generate(PROMPTS[1:2], assistant_model=ordinary, past_key_values=_filled(model), **settings)


def _filled(model):
    cache = model.new_cache()
    with torch.no_grad():
        model(PROMPTS[1:2, :2], past_key_values=cache)
    return cache


def test_guidance_reads_the_unconditional_text_at_the_same_exits(model, monkeypatch):
    configs, forward = [], type(model).forward

    @functools.wraps(forward)
    def spy(self, *args, **kwargs):
        configs.append(kwargs.get("exit_config"))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", spy)
    settings = SETTINGS | {"exit_config": ExitConfig(q=0.6), "max_new_tokens": 4}
    model.generate(PROMPTS[1:2], guidance_scale=1.5, negative_prompt_ids=torch.tensor([[4, 5]]), **settings)
    assert len(configs) > 4
    assert set(configs) == {ExitConfig(q=0.6)}


def test_lockstep_runs_no_loops_for_ended_sequences(model):
    """The pads that the stock loop feeds after an end neither hold the others back nor count."""
    settings = SETTINGS | {"pad_token_id": 0, "exit_config": ExitConfig(q=0.6), "attention_mask": MASK}
    settings["eos_token_id"] = int(model.generate(PROMPTS, **settings).sequences[1, 8])
    ours = model.generate(PROMPTS, **settings)
    assert (ours.exit_depths == 0).any()
    stepped = model.generate(PROMPTS, logits_processor=LogitsProcessorList([Recorder()]), **settings)
    assert torch.equal(stepped.sequences, ours.sequences)
    assert torch.equal(stepped.exit_depths, ours.exit_depths)
    assert stepped.loop_passes == int(ours.exit_depths[:, 1:].max(0).values.sum())


@pytest.mark.parametrize("kept", [torch.tensor([1]), torch.tensor([1, 5])])
def test_chosen_positions_of_a_long_prompt(model, monkeypatch, kept):
    ids = torch.randint(1, 61, (2, 11), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(ids, past_key_values=model.new_cache()).logits[:, kept]
        monkeypatch.setattr(looped_causal, "PROMPT_CHUNK", 4)
        logits = model(ids, past_key_values=model.new_cache(), logits_to_keep=kept).logits
        states = model(
            ids, past_key_values=model.new_cache(), logits_to_keep=1, output_hidden_states=True
        ).hidden_states
    torch.testing.assert_close(logits, expected)
    assert states[0].shape[1] == 11


def test_unknown_arguments_of_forward_are_refused(model):
    with pytest.raises(TypeError, match="takes no argument exit_cfg"):
        model(PROMPTS[1:2], exit_cfg={"q": 0.5})
    for wrong in ({"output_hidden_states": True}, {"labels": torch.tensor([[3]])}):
        with pytest.raises(ValueError, match="is decoded"), torch.no_grad():
            model(PROMPTS[1:2, :1], past_key_values=_filled(model), **wrong)
    checkpointing = tiny_model(seed=0).train()
    checkpointing.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="without a cache"):
        checkpointing(PROMPTS[1:2], past_key_values=checkpointing.new_cache())


def test_an_interrupted_wave_leaves_the_ended_sequences_in_the_cache(model):
    class Interrupt(Recorder):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] == 12:
                raise KeyboardInterrupt
            return scores

    cache = model.new_cache()
    config = ExitConfig(mode="margin", theta=0.01)
    with pytest.raises(KeyboardInterrupt):
        model.generate(
            PROMPTS[1:2], past_key_values=cache, exit_config=config, logits_processor=[Interrupt()], **SETTINGS
        )
    assert cache.trace is None
    assert cache.in_flight is not None
    with torch.no_grad():
        model(PROMPTS[1:2], past_key_values=cache, exit_config=config)
    assert cache.in_flight is None


@pytest.mark.parametrize("config", [config for config in CONFIGS if config.mode != "full"], ids=lambda c: c.mode)
def test_beam_and_assisted_are_refused_elsewhere(model, config):
    with pytest.raises(ValueError, match="beam search works at full depth only"):
        model.generate(PROMPTS, attention_mask=MASK, num_beams=2, max_new_tokens=3, exit_config=config)
    with pytest.raises(ValueError, match="assisted generation works at full depth only"):
        model.generate(PROMPTS[1:2], prompt_lookup_num_tokens=2, max_new_tokens=3, exit_config=config)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"past_key_values": DynamicCache()}, "DynamicCache"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"cache_implementation": "hybrid"}, "cache_implementation='hybrid' has no planes"),
        ({"generation_config": GenerationConfig(cache_implementation="hybrid")}, "cache_implementation='hybrid'"),
        ({"cache_implementation": "paged"}, "K/V plane for all loops|init_continuous_batching"),
        ({"cache_config": {"nbits": 4}}, "cache_config"),
        ({"token_healing": True}, "token_healing=True"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_loop_states"),
        ({"assistant_early_exit": 1}, "assistant_early_exit"),
        ({"exit_config": {"mode": "fixed", "depth": 5}}, "exceeds the model's 4 loops"),
        ({"exit_config": {"threshold": 0.5}}, "threshold"),
    ],
)
def test_refusals_name_the_way_out(model, settings, message):
    with pytest.raises((ValueError, AttributeError), match=message):
        model.generate(PROMPTS[1:2], max_new_tokens=3, **settings)


def test_other_ways_to_hold_keys_and_values_are_refused(model):
    with pytest.raises(ValueError, match="DynamicCache"):
        model(PROMPTS[1:2], past_key_values=DynamicCache())
    assert not hasattr(model, "init_continuous_batching")
    with pytest.raises(ValueError, match="one K/V plane for all loops"):
        model.generate_batch(inputs=[[1, 2, 3]])


def test_exit_config_comes_from_the_call_then_the_generation_config_then_the_checkpoint(model, tmp_path):
    assert model.resolve_exit_config(None) == ExitConfig(q=1.0)
    stepped = tiny_model(seed=0, early_exit_step=1)
    assert stepped.resolve_exit_config(None) == ExitConfig(mode="fixed", depth=2)
    threshold = tiny_model(seed=0, early_exit_threshold=0.25)
    assert threshold.resolve_exit_config(None) == ExitConfig(q=0.25)
    threshold.generation_config.exit_config = ExitConfig(mode="fixed", depth=3)
    assert '"depth": 3' in str(threshold.generation_config)
    threshold.save_pretrained(tmp_path)
    loaded = OuroForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    given = GenerationConfig(max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    given.exit_config = {"mode": "fixed", "depth": 1}
    called = {"exit_config": {"mode": "fixed", "depth": 2}}
    for settings, depth in ((SETTINGS, 3), ({"generation_config": given}, 1), (SETTINGS | called, 2)):
        assert loaded.generate(PROMPTS[1:2], **settings).exit_depths.unique().tolist() == [depth]
    with torch.no_grad():
        assert loaded(PROMPTS[1:2]).exit_depths.unique().tolist() == [3]


def test_long_prompts_run_in_chunks(model, monkeypatch):
    """Ours, those that transformers is asked for, and these in lockstep."""
    ids = torch.randint(1, 61, (2, 23), generator=torch.Generator().manual_seed(0))
    ids[0, :4] = 0
    mask = torch.ones_like(ids).index_put((torch.tensor(0), torch.arange(4)), torch.tensor(0))
    settings = SETTINGS | {"attention_mask": mask, "exit_config": ExitConfig(q=0.6)}
    whole = model.generate(ids, **settings)
    # the length is known, and so is the capacity
    assert whole.past_key_values.planes[0].keys.shape[3] == ids.shape[1] + 10 - 1
    monkeypatch.setattr(looped_causal, "PROMPT_CHUNK", 4)
    lockstep = {"prefill_chunk_size": 2, "logits_processor": LogitsProcessorList([Recorder()])}
    for asked in ({}, {"prefill_chunk_size": 5}, lockstep):
        outputs = model.generate(ids, **asked, **settings)
        assert torch.equal(outputs.sequences, whole.sequences)
        assert torch.equal(outputs.exit_depths, whole.exit_depths)
        assert outputs.prompt_rows == whole.prompt_rows == 4 * int(mask.sum())
        assert [len(reasons) for reasons in outputs.exit_reasons] == [10, 10]


def test_someone_elses_loop_gets_finish_and_drop(model):
    """A plain forward of one token after a DepthCache, outside of generate."""
    for after_exit in ("finish", "drop"):
        config = ExitConfig(q=0.6, after_exit=after_exit)
        expected = model.generate(PROMPTS[1:2], exit_config=config, **SETTINGS)
        cache, ids, depths = DepthCache(2, 4), PROMPTS[1:2], []
        tokens = []
        with torch.no_grad():
            for _ in range(10):
                outputs = model(ids, past_key_values=cache, exit_config=config)
                ids = outputs.logits[:, -1:].argmax(-1)
                tokens.append(int(ids))
                depths.append(int(outputs.exit_depths[0, -1]))
        assert tokens == expected.sequences[0, 4:].tolist()
        assert depths == expected.exit_depths[0].tolist()
        assert (cache.counts.passes, cache.counts.rows) == (expected.loop_passes, expected.loop_rows)
