"""From a trained backbone to a model folder: gate and its threshold, where there is a gate, configs, tokenizer."""

from pathlib import Path

from transformers import GenerationConfig, PreTrainedTokenizerFast

from sigma0.bench.pocket.gate import (
    CALIBRATION_SCENES,
    FIT_FIRST,
    FIT_SCENES,
    Threshold,
    choose_threshold,
    collect,
    fit_gate,
)
from sigma0.bench.pocket.recipe import Recipe
from sigma0.models.looped_causal import LoopedForCausalLM
from sigma0.models.ouro import OuroForCausalLM


def finish(
    model: LoopedForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    folder: Path,
    fit_scenes: int = FIT_SCENES,
    calibration_scenes: int = CALIBRATION_SCENES,
) -> tuple[Threshold, list[Threshold]] | None:
    """Fit the gate on unseen train stories, choose q on calibration stories and write the model folder.

    A model without a gate runs at full depth until it is calibrated (`sigma0 calibrate FOLDER --exit all`).

    Returns:
        The chosen threshold, and all that were measured; None where there is no gate.
    """
    model.eval().requires_grad_(False)
    found: tuple[Threshold, list[Threshold]] | None = None
    exit_config: dict[str, object] = {"mode": "full"}
    if isinstance(model, OuroForCausalLM):
        length, forms = recipe.length, recipe.lessons[-1].forms
        fit_gate(model, collect(model, tokenizer, "train", recipe.seed, FIT_FIRST, fit_scenes, length, forms))
        held_out = collect(model, tokenizer, "calibration", recipe.seed, 0, calibration_scenes, length, forms)
        found = choose_threshold(model, held_out)
        exit_config = {"mode": "qexit", "q": found[0].q}
    generation = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        exit_config=exit_config,
    )
    # While this flag is set, transformers drops what it does not know when the file is read.
    generation._from_model_config = False
    model.generation_config = generation
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return found
