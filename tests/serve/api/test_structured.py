"""`response_format` and vLLM's guided fields, as clients send them."""

import json
import re

import jsonschema
import pydantic
import pytest

from tests.byte_model import byte_model
from tests.decode.grammar.test_bounds import chained
from tests.decode.test_grammar import characters
from tests.schemas import record
from tests.serve.api.test_chat import ASKED, SAID, post
from tests.serve.api.test_completions import post as complete
from tests.serve.api.test_refusals import error_of
from tests.serve.conftest import served

SCHEMA = record({"where": {"enum": ["park", "barn", "garden"]}, "sure": {"type": "boolean"}})
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": SCHEMA}}


class Place(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    where: pydantic.constr(pattern="^[a-z]{3,6}$")
    floors: pydantic.conint(ge=1, le=9)


def ask(server, **body):
    return post(server, **{"max_tokens": 50, **body})


def text_of(answer):
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"]


@pytest.mark.parametrize("after", ["finish", "verify", "drop"])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_schema_is_followed(plain, after, temperature):
    exits = {"mode": "qexit", "q": 0.5, "after_exit": after}
    answer = ask(plain, response_format=FORMAT, temperature=temperature, seed=2, sigma0={"exit": exits})
    jsonschema.validate(json.loads(text_of(answer)), SCHEMA)
    details = answer.json()["sigma0"]["choices"][0]
    assert answer.json()["usage"]["completion_tokens_details"] == {"tokens_forced": details["tokens_forced"]}
    assert details["tokens_forced"] == details["reasons"].count("forced")
    assert (details["tokens_forced"] > 10) == (after != "drop")


@pytest.mark.parametrize(
    "fields",
    [{"response_format": FORMAT}, {"logit_bias": {str(number): 15 if number % 2 else -15 for number in range(3, 303)}}],
    ids=["schema", "bias"],
)
def test_verify_is_full_depth_under_what_is_asked_of_the_text(plain, fields):
    def said(**exits):
        return ask(plain, **fields, sigma0={"exit": exits}).json()["choices"][0]["message"]["content"]

    assert said(mode="margin", theta=0.1, after_exit="verify") == said(mode="full") != SAID


def test_openais_client_parses_its_models(plain):
    asked = {"model": "pocket", "messages": ASKED, "response_format": Place, "max_tokens": 50}
    done = plain.client.chat.completions.parse(**asked)
    assert isinstance(done.choices[0].message.parsed, Place)
    with plain.client.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == done.choices[0].message.parsed


class Found(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    place: str
    sure: bool


@pytest.mark.parametrize(
    "question, answer",
    [
        ("Mary went to the park. Where is Mary?", Found(place="park", sure=True)),
        (
            "The hat is in the box. The box was taken by Ida. Ida went to the barn. Where is the hat?",
            Found(place="barn", sure=True),
        ),
        ("Mary went to the park. Where is Leo?", Found(place="unknown", sure=False)),
    ],
)
def test_the_shipped_model_fills_a_schema_rightly_and_ends(plain, question, answer):
    asked = {"model": "pocket", "messages": [{"role": "user", "content": question}], "response_format": Found}
    done = plain.client.chat.completions.parse(**asked, max_tokens=60).choices[0]
    assert (done.message.parsed, done.finish_reason) == (answer, "stop")


@pytest.mark.parametrize(
    "fields, allowed",
    [
        ({"guided_choice": ["park", "barn"]}, ("park", "barn")),
        ({"guided_regex": "no|yes"}, ("no", "yes")),
        ({"guided_grammar": 'root ::= "a" | "b"'}, ("a", "b")),
        ({"grammar": 'start: "a" | "b"'}, ("a", "b")),
        ({"guided_json": {"const": 7}}, ("7",)),
        ({"guided_json": '{"const": 7}'}, ("7",)),
        ({"structured_outputs": {"json": {"const": 7}}}, ("7",)),
        ({"structured_outputs": {"regex": "ab"}}, ("ab",)),
        ({"structured_outputs": {"choice": ["x"]}}, ("x",)),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, ("a",)),
        ({"response_format": {"type": "text"}, "guided_choice": ["x"]}, ("x",)),
    ],
)
def test_vllms_fields_are_followed(plain, fields, allowed):
    assert text_of(ask(plain, **fields)) in allowed


HOSTILE = {
    "chain of rules": {"guided_grammar": chained(5000)},
    "large repetition": {"guided_regex": "(a{1000}){1000}"},
    "requires itself": {"guided_json": {"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"}},
    "many properties": {"guided_json": {"properties": {f"p{i}": {"type": "integer"} for i in range(5000)}}},
    "an end as a choice": {"guided_choice": ["<|im_end|>"]},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_too_much_for_the_engine_is_400(plain, kind, caplog):
    assert error_of(ask(plain, **HOSTILE[kind]), 400)["code"] == "invalid_grammar"
    assert not caplog.records
    assert ask(plain, guided_regex="[a-z]+").status_code == 200


def test_a_document_ends_within_its_limit_or_is_refused_with_its_length(plain):
    refused = error_of(ask(plain, response_format=FORMAT, max_tokens=5), 400)
    assert refused["code"] == "max_tokens_too_small"
    least = int(re.search(r"takes (\d+) tokens, and 5 are allowed", refused["message"])[1])
    for limit in (least, least + 1, least + 9):
        for seed in range(3):
            body = {"response_format": FORMAT, "max_tokens": limit, "temperature": 1.5, "seed": seed}
            text = ask(plain, **body).json()["choices"][0]["message"]["content"]
            jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.grid(fast=1, slow=1)
@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
def test_any_object_is_one(plain, fields):
    for seed in range(6):
        choice = ask(plain, **fields, temperature=1.5, seed=seed, sigma0={"on_collapse": "ignore"}).json()["choices"][0]
        assert isinstance(json.loads(choice["message"]["content"]), dict), choice


def test_what_runs_in_circles_is_cut(plain):
    answer = ask(plain, guided_regex="(ab ){60}", max_tokens=200).json()
    assert answer["choices"][0]["finish_reason"] == "length" and answer["sigma0"]["choices"][0]["collapsed"]


def test_completions_and_logprobs(plain):
    choice = complete(plain, guided_choice=["park", "barn"], logprobs=5).json()["choices"][0]
    assert choice["text"] in ("park", "barn")
    # of what may not follow there is no probability
    assert all(value > -1e4 for item in choice["logprobs"]["top_logprobs"] for value in item.values())


@pytest.mark.parametrize(
    "fields, param, message",
    [
        ({"guided_json": {"type": "strin"}}, "guided_json", "Invalid type: strin"),
        ({"guided_json": "{"}, None, "schema is no JSON"),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"guided_grammar": "start: b"}, "guided_grammar", "unknown name"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, None, "guided_regex and guided_choice exclude each other"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, None, "exclude each other"),
        ({"response_format": FORMAT | {"json_schema": {"name": "a", "schema": {"not": {}}}}}, "response_format", "not"),
    ],
)
def test_what_cannot_be_followed_is_400(plain, fields, param, message):
    error = error_of(ask(plain, **fields), 400)
    assert (error["code"], error["param"]) == ("invalid_grammar", param)
    assert message in error["message"] and "\n" not in error["message"]


def test_a_keyword_that_cannot_be_enforced_is_ignored_where_strict_is_false(plain):
    schema = {"type": "array", "items": {"const": 1}, "maxItems": 1, "uniqueItems": True}
    named = {"name": "a", "schema": schema, "strict": False}
    answer = ask(plain, response_format={"type": "json_schema", "json_schema": named})
    assert text_of(answer) in ("[]", "[1]")


def test_a_vocabulary_that_cannot_spell_it_is_400():
    model, _ = byte_model(vocab_size=40, eos_token_id=0)
    model.generation_config.eos_token_id = 0
    with served((model, characters('abc0123456789:," '))) as server:
        answer = complete(server, model=server.service.name, prompt=[3, 4], response_format=FORMAT)
        message = error_of(answer, 400)["message"]
        assert "none of its tokens holds" in message and "'{'" in message
