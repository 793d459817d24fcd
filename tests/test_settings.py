from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError

from sigma0 import ExitConfig
from sigma0.serve.limits import ServerSettings
from sigma0.settings import explain


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"q": 0.0}, r"q: must lie in \(0, 1\], got 0.0"),
        ({"q": 1.01}, "got 1.01"),
        ({"q": float("nan")}, "got nan"),
        ({"theta": -1}, r"theta: must lie in \(0, 1\], got -1.0"),
        ({"eps": 0}, "eps: must be a finite number above 0, got 0.0"),
        ({"eps": float("inf")}, "got inf"),
        ({"patience": 0}, "patience: must be at least 1, got 0"),
        ({"min_loops": 0}, "min_loops: must be at least 1, got 0"),
        ({"mode": "fixed"}, "needs depth=k"),
        ({"mode": "fixed", "depth": 0}, "depth: must be at least 1, got 0"),
        ({"depth": 3}, "depth=3 has no meaning for mode 'qexit'"),
        ({"mode": "never"}, "mode: Input should be 'full'.* got 'never'$"),
        ({"q": "much"}, "q: .* got 'much'$"),
        ({"q": "much" * 20}, "q: .*number$"),
        ({"after_exit": "later"}, "after_exit: Input should be"),
        ({"threshold": 0.5}, "threshold: Unexpected keyword argument"),
    ],
)
def test_bad_values_are_named(wrong, message):
    with pytest.raises(ValidationError) as caught:
        ExitConfig.parse(wrong)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in explain(caught.value)
    with pytest.raises(ValueError, match=message):
        raise ValueError(explain(caught.value))


class Told(BaseModel):
    model_config = ConfigDict(extra="forbid")

    api_key: SecretStr | None = None
    count: int = 1
    text: str = ""


@pytest.mark.parametrize("wrong", [{"api_key": 53}, {"apikee": 53}, {"text": 10**5000}, {"count": "5" + 99 * "x"}])
def test_secrets_unknown_fields_and_long_values_are_not_told(wrong):
    with pytest.raises(ValidationError) as caught:
        Told(**wrong)
    told = explain(caught.value)
    assert told.startswith(next(iter(wrong))) and "5" not in told and "got" not in told


def test_the_servers_key_is_not_told():
    with pytest.raises(ValidationError) as caught:
        ServerSettings(api_key="open sesame")
    assert "it is not shown here" in explain(caught.value) and "sesame" not in explain(caught.value)


def test_signs_that_steer_a_terminal_are_told_as_such():
    with pytest.raises(ValidationError) as caught:
        Told(count="forgot\x1b[31m")
    assert explain(caught.value).endswith(r", got 'forgot\x1b[31m'")
    with pytest.raises(ValidationError) as caught:
        Told.model_validate_json('{"text": ')
    assert "got" not in explain(caught.value)


def test_only_mappings_and_configs_are_parsed():
    with pytest.raises(ValueError, match="got str"):
        ExitConfig.parse("qexit")


def test_configs_are_frozen():
    with pytest.raises(FrozenInstanceError):
        ExitConfig().q = 0.1


@given(
    st.builds(
        ExitConfig,
        mode=st.sampled_from(["full", "qexit", "converge", "accel", "margin"]),
        q=st.floats(0.01, 1.0),
        eps=st.floats(1e-4, 10),
        theta=st.floats(0.01, 1.0),
        patience=st.integers(1, 5),
        min_loops=st.integers(1, 9),
        after_exit=st.sampled_from(["finish", "drop"]),
    )
)
def test_dict_round_trip(config):
    assert ExitConfig.parse(config.to_dict()) == config
