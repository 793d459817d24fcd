"""What the texts show of the server works as it stands."""

import json
import re
import shlex
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]


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
