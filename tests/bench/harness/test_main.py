import sys

import pytest

from sigma0.bench.harness import __main__ as command


@pytest.mark.parametrize(
    "arguments, added",
    [
        (["--model", "sigma0", "--tasks", "x"], True),
        (["run", "--model=sigma0", "--model_args", "model=pocket,device=cpu"], True),
        (["-M", "sigma0"], True),
        (["--model", "sigma0", "--device", "cuda:1"], False),
        (["--model", "sigma0", "--device=cpu"], False),
        (["--model", "hf", "--tasks", "sigma0"], False),
        (["--config", "run.yaml", "--model", "sigma0"], False),
        (["ls", "tasks"], False),
        (["--model"], False),
    ],
)
def test_a_device_is_looked_for_where_none_is_named(arguments, added):
    assert command.with_device(arguments) == [*arguments, *(["--device", "auto"] if added else [])]


def test_without_lm_eval_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SystemExit, match=r"sigma0-lm\[eval\]"):
        command.main()
