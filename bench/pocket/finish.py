"""From a trained backbone to a model folder: gate, exit threshold, configs, tokenizer."""

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
from sigma0.models.ouro import OuroForCausalLM


def finish(
    model: OuroForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    folder: Path,
    fit_scenes: int = FIT_SCENES,
    calibration_scenes: int = CALIBRATION_SCENES,
) -> tuple[Threshold, list[Threshold]]:
    """Fit the gate on unseen train stories, choose q on calibration stories and write the model folder.

    Returns:
        The chosen threshold, and all that were measured.
    """
    model.eval().requires_grad_(False)
    fit_gate(model, collect(model, tokenizer, "train", recipe.seed, FIT_FIRST, fit_scenes, recipe.length))
    held_out = collect(model, tokenizer, "calibration", recipe.seed, 0, calibration_scenes, recipe.length)
    chosen, tried = choose_threshold(model, held_out)
    generation = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        exit_config={"mode": "qexit", "q": chosen.q},
    )
    # While this flag is set, transformers drops what it does not know when the file is read.
    generation._from_model_config = False
    model.generation_config = generation
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return chosen, tried
