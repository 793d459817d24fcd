"""Answers that follow a schema, expression, choice or grammar: by every rule, sampled or not, alone and in company."""

import copy
import json

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from tokenizers import Regex as Pattern
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import sigma0
from sigma0.decode.grammar.rows import only_id
from sigma0.decode.grammar.spec import Choice, JsonSchema, Regex
from sigma0.decode.grammar.vocabulary import Constraint, vocabulary_of
from tests.byte_model import END, byte_model
from tests.marks import exhaustive
from tests.reference import decide, gap, setting
from tests.schemas import OBJECTS, REFERENCES, SCHEMAS

RULES = {
    "margin": {"mode": "margin", "theta": 0.5},
    "qexit": {"mode": "qexit", "q": 0.6},
    "converge": {"mode": "converge", "eps": 0.6},
    "kl": {"mode": "kl", "delta": 0.05},
    "entropy-diff": {"mode": "entropy-diff", "delta": 0.1},
    "argmax-stability": {"mode": "argmax-stability", "stable": 1},
    "full": {"mode": "full"},
    "fixed": {"mode": "fixed", "depth": 2},
}
NEW = 150


@pytest.fixture(scope="module")
def byte():
    return byte_model()


def prompts(count):
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, 256, (count, 5), generator=generator)


def written(byte, schemas, rule, after="finish", forces=True, seed=None, prompt=None, **more):
    """The answers of a batch, each under its own schema: ids without pads, and the whole output."""
    model, tokenizer = byte
    ids = prompts(len(schemas)) if prompt is None else prompt
    grammar = [None if item is None else Constraint(JsonSchema.of(item), tokenizer, forces) for item in schemas]
    if seed is not None:
        torch.manual_seed(seed)
        more["do_sample"] = True
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        exit_config={**RULES[rule], "after_exit": after},
        grammar=grammar,
        return_dict_in_generate=True,
        **more,
    )
    rows = out.sequences[:, ids.shape[1] :].tolist()
    return [row[: row.index(END) + 1] if END in row else row for row in rows], out


def finished(byte, rows, schemas):
    """How many answers came to their end; each of these is checked."""
    count = 0
    for row, schema in zip(rows, schemas, strict=True):
        if row[-1] == END:
            text = byte[1].decode(row[:-1])
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
            count += 1
    return count


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("after", ["finish", "verify", "drop"])
def test_every_finished_answer_to_a_hundred_schemas_is_valid(byte, after, seed):
    rows, out = written(byte, SCHEMAS, "margin", after, seed=seed)
    assert finished(byte, rows, SCHEMAS) >= 95
    assert (sum(reason == "forced" for reasons in out.exit_reasons for reason in reasons) > 0) == (after != "drop")


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize("rule", [name for name in RULES if name not in ("full", "fixed")])
def test_verify_under_a_schema_is_full_depth_under_it(byte, rule):
    full, _ = written(byte, SCHEMAS, "full")
    verified, out = written(byte, SCHEMAS, rule, "verify")
    assert verified == full and out.loop_passes > 0


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize("after", ["finish", "verify"])
@pytest.mark.parametrize("rule", list(RULES))
def test_what_is_forced_changes_no_answer(byte, rule, after):
    schemas = [*OBJECTS, *REFERENCES]
    read, plain = written(byte, schemas, rule, after, forces=False)
    forced, out = written(byte, schemas, rule, after)
    assert forced == read
    assert "forced" not in {reason for reasons in plain.exit_reasons for reason in reasons}
    has_forced = "forced" in {reason for reasons in out.exit_reasons for reason in reasons}
    # under `fixed` no loop runs after the depth, so nothing may stop before it
    assert has_forced == (rule != "fixed" or after == "verify")
    if rule in ("qexit", "converge", "full"):
        assert out.head_rows < plain.head_rows and out.loop_passes <= plain.loop_passes


def test_the_first_id_of_a_vocabulary_is_forced_as_any_other(byte):
    model, tokenizer = byte
    grammar = [Constraint(Choice((tokenizer.decode([0]) * 6,)), tokenizer)]
    out = model.generate(prompts(1), max_new_tokens=9, grammar=grammar, return_dict_in_generate=True)
    assert out.sequences[0, 5:].tolist() == [0] * 6 + [END]
    assert out.exit_reasons[0][1:] == ["forced"] * 6


@pytest.mark.grid(fast=1, slow=1)
@pytest.mark.parametrize("after", ["finish", "verify"])
def test_sampled_answers_are_the_same_where_forced_ids_are_read(byte, after):
    read, _ = written(byte, OBJECTS, "qexit", after, forces=False, seed=3)
    forced, _ = written(byte, OBJECTS, "qexit", after, seed=3)
    assert after == "verify" or forced == read
    assert finished(byte, forced, OBJECTS) >= 30


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize("after", ["finish", "verify"])
@pytest.mark.parametrize("rule", ["margin", "qexit", "kl"])
def test_an_answer_is_the_same_alone(byte, rule, after):
    schemas = [schema if place % 3 else None for place, schema in enumerate(SCHEMAS[40:52])]
    together, _ = written(byte, schemas, rule, after)
    ids = prompts(len(schemas))
    for place, schema in enumerate(schemas):
        (alone,), _ = written(byte, [schema], rule, after, prompt=ids[place : place + 1])
        assert alone == together[place]


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize("rule", ["margin", "qexit", "converge"])
def test_finish_is_a_run_of_all_loops_under_the_mask(byte, rule):
    """Exits are picked afterwards, from logits of which nothing but what may follow is left."""
    model, tokenizer = byte
    schemas = [OBJECTS[2], OBJECTS[7], OBJECTS[12], REFERENCES[2]]
    model64, config = copy.deepcopy(model).double(), setting(**RULES[rule])
    vocabulary = vocabulary_of(tokenizer, 260, {END})
    rows, out = written(byte, schemas, rule)
    compared = 0
    for place, (prompt, schema) in enumerate(zip(prompts(len(schemas)).tolist(), schemas, strict=True)):
        layout = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        matcher = LLMatcher(vocabulary.engine, LLMatcher.grammar_from_json_schema(schema, defaults=layout))
        within = vocabulary.compile(JsonSchema.of(schema)).matcher()
        depths = out.exit_depths[place].tolist()
        for index, token in enumerate(rows[place]):
            every = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)[:9]
            # near the limit fewer, which tests of their own hold to a search of all ways
            mask = within.mask(NEW)
            assert not (mask & ~every).any() and (index > NEW // 2 or (mask == every).all())
            allowed = torch.from_numpy(np.unpackbits(mask.view(np.uint8), bitorder="little")[:260]).bool()
            with torch.no_grad():
                outputs = model64.model(input_ids=torch.tensor([prompt]), use_cache=False)
                states = outputs.loop_states[:, 0, -1]
                logits = model64.lm_head(states).masked_fill(~allowed, -torch.inf)
            choice = decide(config, states, outputs.gate_logits[:, 0, -1], logits, 4)
            read = logits[choice.depth - 1]
            if index and int(allowed.sum()) == 1:
                assert (token, depths[index], out.exit_reasons[place][index]) == (int(read.argmax()), 1, "forced")
            elif min(choice.margin, gap(read)) > 1e-5:
                assert (token, depths[index]) == (int(read.argmax()), choice.depth)
                compared += 1
            prompt = [*prompt, token]
            if token != END:
                within.take(token)
                assert matcher.consume_token(token)
    assert compared > 20


def test_forced_tokens_save_passes(byte):
    model, tokenizer = byte
    schema = OBJECTS[-1]
    done = sigma0.generate(model, tokenizer, "hi", schema=schema, exit_config={"mode": "full"}, max_new_tokens=NEW)
    read = [token for token in done.tokens[1:] if token.reason != "forced"]
    assert done.stop_reason == "eos" and done.tokens_forced == len(done.tokens) - 1 - len(read) > 40
    assert done.loop_passes == done.tokens_forced + 4 * len(read)
    assert done.forced_passes_saved == 4 * (len(done.tokens) - 1) - done.loop_passes
    assert done.head_rows == len(read)


@pytest.mark.parametrize(
    "rule, after", [exhaustive("margin", "finish"), exhaustive("margin", "verify"), exhaustive("qexit", "finish")]
)
def test_a_compiled_step_writes_the_same(byte, rule, after):
    expected, _ = written(byte, OBJECTS[:6], rule, after)
    assert written(byte, OBJECTS[:6], rule, after, runner="compile")[0] == expected


def test_an_answer_ends_within_its_limit_or_is_refused(byte):
    with pytest.raises(ValueError, match="the shortest answer that follows it takes 79 tokens, and 5 are allowed"):
        sigma0.generate(*byte, "hi", schema=OBJECTS[-1], max_new_tokens=5)
    for limit in (79, 80, 90):
        done = sigma0.generate(*byte, "hi", schema=OBJECTS[-1], max_new_tokens=limit)
        jsonschema.validate(json.loads(done.text), OBJECTS[-1])
    cut = sigma0.generate(*byte, "hi", grammar="start: /[^x]*x/", max_new_tokens=5)
    assert cut.text.endswith("x") and len(cut.text) <= 5


@pytest.mark.parametrize(
    "given, message",
    [
        ({"schema": {"type": "strin"}}, "schema cannot be followed: Invalid type: strin"),
        ({"schema": 3}, "got 3"),
        ({"schema": {"enum": 5}}, "schema cannot be followed"),
        ({"schema": {"type": 5}}, "schema cannot be followed"),
        ({"schema": {"type": "object", "properties": {"a": {"type": None}}}}, "schema cannot be followed"),
        ({"schema": '{"items":' * 20_000}, "schema is nested too deep"),
        ({"schema": {"allOf": [{"pattern": "a"}] * 40}}, "40 expressions at once"),
        ({"regex": "(a"}, "regex cannot be followed: .*unclosed group"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice exclude each other"),
    ],
)
def test_what_is_wrong_is_named_in_a_line(byte, given, message):
    with pytest.raises(ValueError, match=message) as refused:
        sigma0.generate(*byte, "hi", **given)
    assert "\n" not in str(refused.value)


def characters(known):
    """A tokenizer of single characters, without the byte-level alphabet."""
    ids = {symbol: item for item, symbol in enumerate(["<end>", "<unk>", *known])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Pattern("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unk>")


def test_a_vocabulary_that_cannot_spell_an_answer_is_named():
    vocabulary = vocabulary_of(characters('abcdeflnrstu0123456789:," ['), 40, {0})
    with pytest.raises(ValueError, match=r"none of its tokens holds '\{', '\}'"):
        vocabulary.compile(JsonSchema.of(OBJECTS[0]))
    with pytest.raises(ValueError, match=r"holds '\]'"):
        vocabulary.compile(JsonSchema.of({"type": "array"}))
    with pytest.raises(ValueError, match="holds 'k'"):
        vocabulary.compile(Choice(("bank",)))
    matcher = vocabulary.compile(JsonSchema.of({"enum": ["ab", 12]})).matcher()
    for symbol in '"ab"':
        matcher.take(vocabulary.engine.tokenize_str(symbol)[0])
    assert only_id(matcher.mask()) == 0


def test_where_no_token_fits_any_more_the_answer_ends_with_an_error():
    vocabulary = vocabulary_of(characters("abc"), 5, {0})
    with pytest.raises(ValueError, match="regex cannot be followed: NoExtensionBias"):
        vocabulary.compile(Regex("ab[x-z]"))
    matcher = vocabulary.compile(Regex("ab[x-z]|c+")).matcher()
    matcher.take(2)
    matcher.take(3)
    with pytest.raises(ValueError, match="cannot go on"):
        matcher.mask()


def test_settings_that_leave_no_id_are_named(byte):
    with pytest.raises(ValueError, match="leave no id"):
        sigma0.generate(*byte, "hi", choice=["a"], min_new_tokens=5)


def test_beams_follow_no_grammar(byte):
    model, tokenizer = byte
    with pytest.raises(ValueError, match="beam search follows no grammar"):
        model.generate(prompts(1), num_beams=2, grammar=Constraint(Choice(("a",)), tokenizer), max_new_tokens=3)


def test_a_choice_has_any_number_of_texts(byte):
    """Of a rule with over 2,000 alternatives the parser gives up at the second id."""
    texts = tuple(f"number {number}" for number in range(5000))
    matcher = vocabulary_of(byte[1], 260, {END}).compile(Choice(texts)).matcher()
    ids = byte[1]("number 4321")["input_ids"]
    for token_id in ids:
        assert matcher.mask()[token_id // 32] >> (token_id % 32) & 1
        matcher.take(token_id)
    matcher.check(END)


def test_a_choice_allows_its_texts_and_no_other(byte):
    rng = np.random.default_rng(5)
    for _ in range(30):
        signs, count = list('ab"\\\n /|.*é'), rng.integers(1, 8)
        texts = {"".join(rng.choice(signs, rng.integers(1, 5))) for _ in range(count)}
        compiled = vocabulary_of(byte[1], 260, {END}).compile(Choice(tuple(texts)))
        spelled = [tuple(byte[1](text)["input_ids"]) for text in texts]
        for ids in spelled:
            matcher = compiled.matcher()
            for at in range(len(ids) + 1):
                follow = {END if item == ids[:at] else item[at] for item in spelled if item[:at] == ids[:at]}
                bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
                assert set(np.flatnonzero(bits).tolist()) == follow, (texts, ids[:at])
                if at < len(ids):
                    matcher.take(ids[at])
