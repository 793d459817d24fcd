"""Models with a confidence model of the simplest kind, which knows the pairs of words of some prompts, or with none."""

import copy
from collections.abc import Iterable

from sigma0.models.prompts import encode
from sigma0.signals.confidence import ConfidenceModel, pair_codes

FIGURES = {"answers": 100, "auroc": 0.9, "brier": 0.1, "calibration_error": 0.02}


def uncalibrated(pair):
    """A copy of a model without a confidence model, and its tokenizer."""
    model = copy.deepcopy(pair[0])
    model.generation_config.confidence_model = None
    return model, pair[1]


def calibrated(pair, prompts: Iterable, **fields):
    """A copy of a model and its tokenizer, with confidence = 1 / (1 + mean entropy), nearly.

    Args:
        pair: The model and its tokenizer.
        prompts: Whose pairs are not new.
        **fields: Of its `ConfidenceModel`, in place of those here.
    """
    model, tokenizer = copy.deepcopy(pair[0]), pair[1]
    known = {code for prompt in prompts for code in pair_codes(encode(tokenizer, prompt)[0].tolist())}
    settings = {
        "features": ("mean_entropy",),
        "weights": (1.0,),
        "bias": 0.0,
        "most": (10.0,),
        "longest": 1000,
        "pairs": tuple(sorted(known)),
        "most_new": 0.0,
        "deciles": tuple(k / 10 for k in range(1, 10)),
        **FIGURES,
    }
    model.generation_config.confidence_model = ConfidenceModel(**(settings | fields)).to_dict()
    return model, tokenizer
