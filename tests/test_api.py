import copy
import json
import re

import pytest
import torch
from transformers import AutoTokenizer, pipeline
from transformers.generation.stopping_criteria import StopStringCriteria

import sigma0
from sigma0 import ExitConfig
from sigma0.signals.evidence import evidence_of
from sigma0.signals.verdict import DoorPolicy, aggregate
from tests.reference import finish_rows, tiny_llama

STORY = "Mary went to the kitchen. John went to the garden. Where is Mary?"
MESSAGES = [{"role": "user", "content": STORY}]


def test_generation_agrees_with_model_generate(pocket):
    model, tokenizer = pocket
    config = ExitConfig(q=0.4)
    ids = tokenizer(STORY, return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=12, do_sample=False, exit_config=config, return_dict_in_generate=True)
    generation = sigma0.generate(model, tokenizer, STORY, exit_config=config, max_new_tokens=12)
    tokens = generation.tokens
    assert [token.id for token in tokens] == expected.sequences[0, ids.shape[1] :].tolist()
    assert [token.depth for token in tokens] == expected.exit_depths[0].tolist()
    assert [token.reason for token in tokens] == expected.exit_reasons[0]
    assert (generation.loop_passes, generation.loop_rows) == (expected.loop_passes, expected.loop_rows)
    assert generation.text == tokenizer.decode(expected.sequences[0, ids.shape[1] :], skip_special_tokens=True)
    assert generation.prompt_tokens == ids.shape[1]


@pytest.mark.parametrize("after_exit", ["finish", "drop"])
def test_savings_follow_from_the_tokens(pocket, after_exit):
    config = ExitConfig(mode="margin", theta=0.6, after_exit=after_exit)
    generation = sigma0.generate(*pocket, MESSAGES, exit_config=config, max_new_tokens=16)
    depths = [token.depth for token in generation.tokens]
    total, later = pocket[0].num_loops, depths[1:]
    assert later, "the test needs more than one token"
    assert generation.mean_depth == pytest.approx(sum(later) / len(later))
    assert generation.depth_saved == pytest.approx(1 - sum(later) / (total * len(later)))
    assert generation.passes_saved == pytest.approx(generation.depth_saved)
    rows = finish_rows(depths, total) if after_exit == "finish" else sum(later)
    assert generation.rows_saved == pytest.approx(1 - rows / (total * len(later)))


def test_messages_go_through_the_chat_template_and_strings_do_not(pocket):
    model, tokenizer = pocket
    chat = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    by_messages = sigma0.generate(model, tokenizer, MESSAGES, max_new_tokens=4)
    by_hand = sigma0.generate(model, tokenizer, chat, max_new_tokens=4, special_tokens=True)
    plain = sigma0.generate(model, tokenizer, STORY, max_new_tokens=4)
    assert by_messages == by_hand
    assert plain.prompt_tokens == len(tokenizer(STORY).input_ids) < by_messages.prompt_tokens


@pytest.mark.parametrize(
    "content, message",
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "got {'type': 'image_url'"),
        ([{"type": "text"}], "a part of a message is"),
        (["x"], "got 'x'"),
        (None, "a string or a list of text parts, got None"),
        ({"type": "text", "text": "x"}, "a string or a list of text parts"),
    ],
)
def test_content_may_come_in_parts(pocket, content, message):
    parts = [{"role": "user", "content": [{"type": "text", "text": line} for line in STORY.split(" Where")]}]
    joined = [{"role": "user", "content": STORY.replace(" Where", "\n", 1)}]
    for special in (False, True):
        settings = {"max_new_tokens": 4, "special_tokens": special}
        assert sigma0.generate(*pocket, parts, **settings) == sigma0.generate(*pocket, joined, **settings)
        with pytest.raises(ValueError, match=re.escape(message)):
            sigma0.generate(*pocket, [{"role": "user", "content": content}], **settings)


def test_stream_yields_while_generating(pocket):
    stream = sigma0.stream(*pocket, STORY, max_new_tokens=6, exit_config={"q": 0.4})
    first = next(stream)
    assert stream._loop.lengths[0] == len(pocket[1](STORY).input_ids) + 1
    with pytest.raises(ValueError, match="not finished"):
        _ = stream.generation
    tokens = [first, *stream]
    finished = stream.generation.tokens
    # loops behind the exits go on, so what is told of them may grow
    assert [(token.id, token.text, token.depth) for token in tokens] == [
        (token.id, token.text, token.depth) for token in finished
    ]
    assert stream.generation == sigma0.generate(*pocket, STORY, max_new_tokens=6, exit_config={"q": 0.4})


class Force:
    """A logits processor that dictates the ids."""

    def __init__(self, ids):
        self.ids = list(ids)

    def __call__(self, input_ids, scores):
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.ids.pop(0)] = 0.0
        return forced


def forced(pocket, text, **kwargs):
    ids = pocket[1](text).input_ids
    kwargs = {"max_new_tokens": len(ids)} | kwargs
    return sigma0.generate(*pocket, "x", logits_processor=[Force([*ids, *[5] * 50])], **kwargs)


@pytest.mark.parametrize("text", ["naïve café", "日本語と🙂🚀", "a\u0301 b\n\n  c\t", "👩‍👩‍👧 done", "Ω≈ç√ 12345"])
def test_characters_split_over_tokens_come_out_whole(pocket, text):
    generation = forced(pocket, text)
    assert generation.text == text
    assert all("\ufffd" not in token.text for token in generation.tokens)


def test_stop_reasons(pocket):
    model, tokenizer = pocket
    assert forced(pocket, "one two").stop_reason == "length"
    stopped = forced(pocket, "one two three four", stop=["two"])
    assert stopped.stop_reason == "stop"
    assert stopped.text.endswith("two")
    ended = sigma0.generate(model, tokenizer, "x", logits_processor=[Force([5, 6, 2, 7])], max_new_tokens=9)
    assert (ended.stop_reason, len(ended.tokens), ended.tokens[-1].text) == ("eos", 3, "")

    after_two = [lambda ids, scores, **_: torch.tensor([ids.shape[1] >= 1 + 2])]
    criterion = sigma0.generate(model, tokenizer, "x", stopping_criteria=after_two, max_new_tokens=9)
    assert len(tokenizer("x").input_ids) == 1
    assert (criterion.stop_reason, len(criterion.tokens)) == ("stop", 2)


def test_seed_makes_sampling_repeat_and_leaves_the_global_generator_alone(pocket):
    settings = {"do_sample": True, "temperature": 2.0, "max_new_tokens": 10}
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = sigma0.generate(*pocket, STORY, seed=3, **settings)
    assert torch.equal(torch.get_rng_state(), before)
    assert sigma0.generate(*pocket, STORY, seed=3, **settings) == first
    others = {sigma0.generate(*pocket, STORY, seed=seed, **settings).text for seed in range(8)}
    assert len(others) > 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": ()}, "the prompt is empty"),
        ({"prompt": {"role": "user", "content": "x"}}, "a prompt is a string or a list of messages, got dict"),
        ({"prompt": ["x"]}, "a prompt is a string or a list of messages, got list"),
        ({"prompt": b"x"}, "a prompt is a string or a list of messages, got bytes"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1, got 0"),
        ({"max_new_tokens": 2.5}, "got 2.5"),
        ({"attention_mask": None}, "attention_mask cannot be used here"),
        ({"prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens cannot be used here"),
        ({"stop": ["a", ""]}, "a stop string must not be empty"),
        ({"max_new_tokens": 4000}, "4000 new ones exceed the model's context of 2048"),
        ({"num_beams": 3}, "num_beams cannot be used here"),
        ({"stop": "word"}, "list of strings, got the string 'word'"),
        ({"exit_config": {"q": 2}}, "got 2.0"),
        ({"temprature": 2}, "temprature"),
    ],
)
def test_bad_arguments_are_named(pocket, arguments, message):
    with pytest.raises(ValueError, match=message):
        sigma0.generate(*pocket, **{"prompt": "x", **arguments})


def test_other_models_and_templateless_tokenizers_are_refused(pocket):
    with pytest.raises(ValueError, match="LlamaForCausalLM is not a looped model"):
        sigma0.generate(tiny_llama(seed=0, vocab_size=20), pocket[1], "x")
    plain = AutoTokenizer.from_pretrained(pocket[1].name_or_path)
    plain.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        sigma0.generate(pocket[0], plain, MESSAGES)


RULES = [
    {"mode": "full"},
    {"mode": "fixed", "depth": 2},
    {"q": 0.2},
    {"mode": "margin", "theta": 0.6},
    {"mode": "converge", "eps": 0.4},
    {"mode": "accel", "eps": 0.6, "patience": 1},
    {"mode": "kl", "delta": 0.05},
]


@pytest.mark.grid(fast=2, slow=3)
@pytest.mark.parametrize("after", ["finish", "verify", "drop"])
@pytest.mark.parametrize("rule, runner", [*((rule, "eager") for rule in RULES), (RULES[3], "compile")])
def test_stop_strings_end_a_text_where_transformers_own_criterion_does(pocket, rule, after, runner):
    model, tokenizer = pocket
    prompts = [STORY, "Mary went to the park. The hat is with Mary. Where is the hat?", "John is in the"]
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    width = batch.input_ids.shape[1]
    # verify writes what full depth writes; every other setting its own text, up to the string
    written = {"mode": "full"} if after == "verify" else {**rule, "after_exit": after}
    whole = model.generate(**batch, max_new_tokens=12, exit_config=written)
    settings = {"max_new_tokens": 12, "exit_config": {**rule, "after_exit": after}, "runner": runner}
    # the third begins in the prompt of the first, and the fourth ends nowhere
    for stop in (["the"], [" in the k", "."], "? M", ["Vienna"]):
        criterion = StopStringCriteria(tokenizer, stop)
        expected = whole.clone()
        for row, ids in enumerate(whole):
            ends = (end for end in range(width + 1, len(ids)) if criterion(ids[None, :end], None))
            expected[row, next(ends, len(ids)) :] = tokenizer.pad_token_id
        lengths = (expected != tokenizer.pad_token_id).nonzero()[:, 1].max() + 1
        got = model.generate(**batch, stop_strings=stop, tokenizer=tokenizer, **settings)
        assert got.tolist() == expected[:, :lengths].tolist()
        stream = sigma0.stream(model, tokenizer, STORY, stop_strings=stop, **settings)
        alone = model.generate(**tokenizer(STORY, return_tensors="pt"), max_new_tokens=12, exit_config=written)[0]
        output, start = [token.id for token in stream], len(tokenizer(STORY).input_ids)
        ends = (end for end in range(start + 1, len(alone)) if criterion(alone[None, :end], None))
        assert output == alone[start : next(ends, len(alone))].tolist()


def test_stop_strings_stop_pipelines_beams_and_what_a_checkpoint_asks_for(pocket, monkeypatch):
    model, tokenizer = pocket
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    settings = {"max_new_tokens": 12, "do_sample": False}
    (result,) = generator(STORY, stop_sequence="in the", return_full_text=False, **settings)
    assert result["generated_text"] == " Mary is in the"
    batch = generator([STORY, "John"], batch_size=2, stop_sequence=["is"], return_full_text=False, **settings)
    assert [row[0]["generated_text"] for row in batch] == [
        sigma0.generate(model, tokenizer, prompt, max_new_tokens=12, stop=["is"]).text for prompt in (STORY, "John")
    ]
    ids = tokenizer(STORY, return_tensors="pt")
    beams = {"num_beams": 2, "exit_config": {"mode": "full"}, **settings}
    text = tokenizer.decode(model.generate(**ids, stop_strings="in", tokenizer=tokenizer, **beams)[0])
    assert text.startswith(STORY) and " in" in text[len(STORY) :]
    monkeypatch.setattr(model.generation_config, "stop_strings", ["in the"])
    stored = sigma0.generate(model, tokenizer, STORY)
    assert (stored.text, stored.stop_reason) == (" Mary is in the", "stop")


@pytest.mark.parametrize("rows", [1, 2])
def test_a_cache_is_continued_only_with_the_text_that_it_holds_the_beginning_of(pocket, rows):
    model, tokenizer = pocket
    ids = tokenizer(STORY, return_tensors="pt").input_ids.repeat(rows, 1)
    cache = model.new_cache()
    settings = {"cache": cache, "max_new_tokens": 4, "do_sample": False}
    text = model.generate(ids, **settings)
    held, width = cache.length, ids.shape[1]
    for prompt, seen in ((ids, width), (text[:, :held], held), (ids[:, :3], 7), (ids, text.shape[1] - 1)):
        wrong = rf"holds {held} tokens.*prompt of {prompt.shape[1]} .*mask of {seen}"
        with pytest.raises(ValueError, match=wrong):
            model.generate(prompt, attention_mask=torch.ones(rows, seen, dtype=torch.long), **settings)
    whole = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert model.generate(text, **settings).tolist() == whole.tolist()


@pytest.mark.parametrize("settings", [{}, {"do_sample": True}, {"num_beams": 2, "exit_config": {"mode": "full"}}])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("after", ["finish", "verify", "drop"])
@pytest.mark.parametrize("score", [-torch.inf, torch.nan])
def test_a_logits_processor_that_leaves_nothing_is_named(pocket, settings, rows, after, score):
    def forbid_all(ids, scores):
        return torch.full_like(scores, score)

    ids = pocket[1](STORY, return_tensors="pt").input_ids.repeat(rows, 1)
    settings = {"exit_config": {"q": 0.4, "after_exit": after}, **settings}
    with pytest.raises(ValueError, match="forbid_all leaves no token"):
        pocket[0].generate(ids, max_new_tokens=2, logits_processor=[forbid_all], **settings)


@pytest.mark.parametrize("settings", [{}, {"do_sample": True}])
@pytest.mark.parametrize("after", ["finish", "verify"])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_score_without_end_is_a_choice(pocket, settings, after, rows):
    def choose(ids, scores):
        return scores.index_fill(1, torch.tensor([7]), torch.inf)

    ids = pocket[1](STORY, return_tensors="pt").input_ids.repeat(rows, 1)
    settings = {"exit_config": {"q": 0.4, "after_exit": after}, "max_new_tokens": 3, **settings}
    if rows == 1 or after == "verify" or not settings.get("do_sample"):
        assert (pocket[0].generate(ids, logits_processor=[choose], **settings)[:, -3:] == 7).all()


def test_every_token_and_text_has_a_verdict_which_changes_no_token_and_can_be_left_out(pocket, monkeypatch):
    model, tokenizer = pocket
    story = "Mary went to the park. The hat is with Mary. Where is the hat?"
    output = sigma0.generate(model, tokenizer, story)
    assert output.verdict is not None and output.grounding is not None
    for token in output.tokens:
        assert None not in (token.radius, token.angle, token.proximity, token.margin, token.entropy)
        assert token.verdict.reason == token.reason and token.verdict.depth == token.depth
    assert output.verdict.depth == sum(token.depth for token in output.tokens) / len(output.tokens)
    expected = aggregate([token.verdict for token in output.tokens], grounded=output.grounding.score)
    evidence = evidence_of(output.tokens, model.num_loops, output.grounding.score)
    confidence = model.confidence_model.confidence(evidence)
    assert output.verdict == expected.model_copy(update={"confidence": confidence})
    assert output.door == "converge" and confidence > 0.9
    assert json.loads(json.dumps(output.to_dict()))["verdict"]["reason"] == output.verdict.reason
    monkeypatch.setenv("SIGMA0_VERDICT", "0")
    plain = sigma0.generate(model, tokenizer, story)
    assert plain.verdict is None and plain.grounding is None
    assert [(token.id, token.depth, token.reason) for token in output.tokens] == [
        (token.id, token.depth, token.reason) for token in plain.tokens
    ]
    assert set(plain.to_dict()["tokens"][0]) == {"id", "text", "depth", "reason"}
    assert not {"verdict", "grounding"} & set(plain.to_dict())
    with pytest.raises(ValueError, match="no verdict was asked for"):
        _ = plain.tokens[0].verdict
    assert sigma0.generate(model, tokenizer, story, verdict=True).verdict == output.verdict


def test_sources_and_policies_are_checked_before_anything_runs(pocket):
    with pytest.raises(ValueError, match="sources takes a list of texts"):
        sigma0.generate(*pocket, "Hi", sources="The hat is with Mary.")
    with pytest.raises(ValueError, match="tau_x"):
        sigma0.generate(*pocket, "Hi", policy={"tau_x": 0.3})
    done = sigma0.generate(*pocket, "Mary has a hat.", policy={"tau_c": 0.3}, max_new_tokens=2)
    assert done.policy == DoorPolicy(tau_c=0.3)


@pytest.mark.parametrize("name, value", [("fate_config", {"growth": 9.0}), ("door_policy", {"tau_c": 0.1})])
def test_what_belongs_to_the_model_is_refused_in_a_call(pocket, name, value):
    model, tokenizer = pocket
    ids = tokenizer("Mary has a hat.", return_tensors="pt")
    with pytest.raises(ValueError, match=f"{name} belongs to the model"):
        model.generate(**ids, max_new_tokens=2, **{name: value})
    asked = copy.deepcopy(model.generation_config)
    setattr(asked, name, value)
    with pytest.raises(ValueError, match=f"{name} belongs to the model"):
        model.generate(**ids, generation_config=asked)
