"""What the server says of itself, and what the texts show of it."""

import json
import re
import shlex
from pathlib import Path

import httpx
from openai.types import Model
from prometheus_client.parser import text_string_to_metric_families

from sigma0.checkpoints import resolve_model
from sigma0.checkpoints.about import read_about
from sigma0.config import exit_for
from sigma0.serve.api.info import PAGE_HEADERS
from tests.serve.api.test_chat import post
from tests.serve.conftest import served

ROOT = Path(__file__).parents[3]


def scraped(server):
    families = list(text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text))
    samples = [sample for family in families for sample in family.samples if not sample.name.endswith("_created")]
    values = {(sample.name, *sample.labels.values()): sample.value for sample in samples}
    return {family.name for family in families}, values


def test_models(plain):
    (model,) = plain.client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("pocket", "model", "sigma0")
    assert plain.client.models.retrieve("pocket") == model
    Model.model_validate(httpx.get(f"{plain.url}/v1/models/pocket").json(), strict=True)
    missing = httpx.get(f"{plain.url}/v1/models/some/other")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"


def test_the_model_as_a_looped_one(plain, pocket):
    current, about = pocket[0].resolve_exit_config(None), read_about(resolve_model("pocket"))
    confidence = ("answers", "auroc", "calibration_error")
    efforts = ("minimal", "low", "medium", "high")
    assert httpx.get(f"{plain.url}/v1/sigma0").json() == {
        "model": "pocket",
        "total_loops": 6,
        "exit": current.to_dict(),
        "efforts": {effort: exit_for(effort, current, 6).to_dict() for effort in efforts},
        "ladder": None,
        "context": 2048,
        "knows": about.knows,
        "examples": [example.prompt for example in about.examples],
        "confidence": {name: getattr(pocket[0].confidence_model, name) for name in confidence},
    }


def test_health_and_the_page(plain):
    assert httpx.get(f"{plain.url}/health").json() == {"status": "ok"}
    head = httpx.head(f"{plain.url}/health")
    assert head.status_code == 200 and head.content == b""
    page = httpx.get(f"{plain.url}/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert {header: page.headers[header] for header in PAGE_HEADERS} == PAGE_HEADERS
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert "http" not in PAGE_HEADERS["Referrer-Policy"]
    for name in re.findall(r'(?:src|href)="(page/[a-z.]+)"', page.text):
        file = httpx.get(f"{plain.url}/{name}")
        assert file.status_code == 200 and file.headers["x-content-type-options"] == "nosniff"
        assert re.match("(application|text)/(javascript|css)", file.headers["content-type"])
    for path in ("page/none.js", "page/", "page/..%2fapp.py", "page/%2e%2e/app.py"):
        missing = httpx.get(f"{plain.url}/{path}")
        assert missing.status_code == 404 and "error" in missing.json()


def test_metrics(pocket):
    with served(pocket) as server:
        result = post(server).json()
        post(server, stream=True)
        post(server, temperature=9)
        post(server, n=9)
        (output,) = result["sigma0"]["choices"]
        _, values = scraped(server)
    depth = sum(output["depths"]) / len(output["depths"])
    assert values["sigma0_tokens_total",] == 14
    # prompts take passes too, of which the last are those of the answer
    passes, rows = values["sigma0_passes_total",], values["sigma0_rows_total",]
    assert 2 * output["passes"] < passes <= 2 * (output["passes"] + 6) < rows
    assert values["sigma0_mean_depth",] == depth and abs(values["sigma0_depth_saved",] - (1 - depth / 6)) < 1e-9
    assert values["sigma0_queue",] == values["sigma0_running",] == values["sigma0_hand_ups_total",] == 0
    assert values["sigma0_pages",] > 100 and values["sigma0_preemptions_total",] == 0
    assert values["sigma0_requests_total", "chat", "200"] == 2 and values["sigma0_requests_total", "chat", "400"] == 1
    assert values["sigma0_request_seconds_count",] == values["sigma0_first_token_seconds_count",] == 2
    assert values["sigma0_between_tokens_seconds_count",] == 12


def test_the_clients_lines(plain, capsys):
    blocks = re.findall(r"^```py\n(.*?)^```$", (ROOT / "serve" / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (code,) = (block for block in blocks if "import OpenAI" in block)
    assert "http://127.0.0.1:8000/v1" in code
    exec(compile(code.replace("http://127.0.0.1:8000", plain.url), "README.md", "exec"), {"__name__": "__readme__"})
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) >= 5 and printed[0].endswith("threshold_met")
    assert printed[-1].split(" ", 1)[1].startswith(("converge: ", "escalate: "))


def test_the_readme_s_request_is_answered(plain):
    (line,) = re.findall(r"^(curl (?:.*\\\n)*.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    _, url, _, header, _, body = shlex.split(line.replace("\\\n", " "))
    name, _, value = header.partition(": ")
    response = httpx.post(url.replace("http://127.0.0.1:8000", plain.url), headers={name: value}, content=body)
    assert response.status_code == 200, response.text
    message = response.json()["choices"][0]["message"]["content"]
    assert json.loads(body)["model"] == "pocket" and message
