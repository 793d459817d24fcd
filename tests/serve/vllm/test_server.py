"""`vllm serve` with the plugin and the real OpenAI client; and that the plugin changes nothing for other models."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import sigma0
from sigma0.bench.pocket.prompts import micro_world
from sigma0.bench.serving.servers import draft_arguments, draft_counts, vllm_server
from sigma0.models.export import export
from tests.schemas import record
from tests.serve.vllm.engines import SETTINGS, needs_vllm

pytestmark = needs_vllm
openai = pytest.importorskip("openai")

SCHEMA = record({"place": {"enum": ["park", "barn", "garden"]}, "sure": {"type": "boolean"}})
SERVE_A_LLAMA = """
import json, sys
if __name__ == "__main__":
    from vllm import LLM, SamplingParams, ModelRegistry
    llm = LLM(sys.argv[1], skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=128)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [k, 2 * k, 9, 30]} for k in range(1, 9)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    known = "OuroForCausalLM" in ModelRegistry.get_supported_archs()
    print("RESULT", json.dumps([known, [list(output.outputs[0].token_ids) for output in outputs]]))
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "pocket"
    export(*sigma0.load("pocket", device="cpu"), folder)
    return folder


def test_a_real_client_gets_full_depth_from_a_server_with_drafts(exported):
    model, tokenizer = sigma0.load("pocket", device="cpu", dtype="float32")
    messages = [prompt.content for prompt in micro_world(32) if not isinstance(prompt.content, str)]
    # a small model that is free to write white space may write nothing else
    compact = json.dumps({"backend": "xgrammar", "disable_any_whitespace": True})
    arguments = ["--enforce-eager", "--max-model-len", "512", "--structured-outputs-config", compact]
    arguments += draft_arguments(4, 2)
    with vllm_server(sys.executable, exported, arguments) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")

        def ask(message, **settings):
            return client.chat.completions.create(
                model="pocket", messages=message, temperature=0, **{"max_tokens": 32, **settings}
            )

        def streamed(message):
            chunks = ask(message, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

        expected = [
            sigma0.generate(model, tokenizer, message, exit_config=sigma0.ExitConfig(mode="full"), max_new_tokens=32)
            for message in messages
        ]
        texts = [item.text for item in expected]
        with ThreadPoolExecutor(16) as pool:
            assert list(pool.map(streamed, messages)) == texts
        assert [ask(message).choices[0].message.content for message in messages[:4]] == texts[:4]
        counts = draft_counts(url)
        assert counts["accepted_tokens"] > counts["drafts"] > 0
        schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
        for message in messages[:4]:
            answer = json.loads(ask(message, response_format=schema, max_tokens=96).choices[0].message.content)
            assert set(answer) == {"place", "sure"} and answer["place"] in SCHEMA["properties"]["place"]["enum"]


def test_another_model_writes_the_same_with_and_without_the_plugin(tmp_path):
    config = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128}
    LlamaForCausalLM(LlamaConfig(**config, **heads, initializer_range=0.2)).save_pretrained(tmp_path / "llama")
    script = tmp_path / "serve_a_llama.py"
    script.write_text(SERVE_A_LLAMA)

    def run(environment):
        command = [sys.executable, str(script), str(tmp_path / "llama")]
        output = subprocess.run(
            command, env={**os.environ, **SETTINGS, **environment}, capture_output=True, text=True, check=True
        ).stdout
        (result,) = (line.removeprefix("RESULT ") for line in output.splitlines() if line.startswith("RESULT "))
        return json.loads(result)

    known, with_it = run({})
    unknown, without = run({"VLLM_PLUGINS": ""})
    assert known and not unknown
    assert with_it == without
