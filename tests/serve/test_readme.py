"""What the README shows of the server works as it stands."""

import re
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_clients_lines(plain, capsys):
    (code,) = re.findall(r"^```py\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert "http://127.0.0.1:8000/v1" in code
    exec(compile(code.replace("http://127.0.0.1:8000", plain.url), "README.md", "exec"), {"__name__": "__readme__"})
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) >= 5 and printed[0].endswith("threshold_met")
    assert printed[-1].split(" ", 1)[1].startswith(("converge: ", "escalate: "))
