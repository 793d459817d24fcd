import pytest
from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError

from sigma0.errors import first_line, one_line
from sigma0.serve.api.access import ServerSettings


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid")

    api_key: SecretStr | None = None
    count: int = 1
    text: str = ""


def told(make, *arguments, **fields):
    with pytest.raises(ValidationError) as caught:
        make(*arguments, **fields)
    return one_line(caught.value)


@pytest.mark.parametrize("wrong", [{"api_key": 53}, {"apikee": 53}, {"text": 10**5000}, {"count": "5" + 99 * "x"}])
def test_secrets_unknown_fields_and_long_values_are_not_quoted(wrong):
    text = told(Settings, **wrong)
    assert text.startswith(next(iter(wrong))) and "5" not in text and "got" not in text


def test_the_servers_key_is_not_quoted():
    text = told(ServerSettings, api_key="open sesame")
    assert "it is not shown here" in text and "sesame" not in text


def test_signs_that_steer_a_terminal_are_quoted_escaped():
    assert told(Settings, count="forgot\x1b[31m").endswith(r", got 'forgot\x1b[31m'")
    assert "got" not in told(Settings.model_validate_json, '{"text": ')


def test_other_errors_lose_their_line_breaks_and_libraries_their_advice():
    error = OSError("no such file:\n  weights\r\n\tTry another.")
    assert one_line(error) == "no such file: weights Try another."
    assert first_line(error) == "no such file:"
    assert (one_line(ValueError()), first_line(ValueError())) == ("", "")
