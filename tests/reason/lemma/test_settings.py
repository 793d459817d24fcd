import json

import pytest

from sigma0.reason.lemma import LemmaSettings


def test_settings_survive_json():
    settings = LemmaSettings(repairs=1, workers=3, efforts={"check": "high"})
    assert settings.efforts.check == "high" and settings.efforts.plan == "medium"
    assert LemmaSettings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings


@pytest.mark.parametrize(
    "value",
    [
        {"repair": 1},
        {"repairs": -1},
        {"workers": 0},
        {"memory_mb": 16},
        {"temperature": float("nan")},
        {"code_timeout_s": 0},
        {"code_timeout_s": float("inf")},
        {"efforts": {"prove": "extreme"}},
        {"efforts": {"guess": "low"}},
    ],
)
def test_bad_settings_are_refused_by_name(value):
    with pytest.raises(ValueError, match=next(iter(value))):
        LemmaSettings.from_dict(value)
