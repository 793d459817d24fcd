"""Which jobs can run at all: asked before they are queued, also where the engine is in another process."""

from typing import Any

from sigma0.serve.engine.messages import Job


def context_of(model: Any, pages: int, page_size: int) -> int:
    """Tokens that prompt and answer may have together: as many as the model's positions and the K/V hold.

    Args:
        model: The looped model; its weights are not looked at.
        pages: Of K/V.
        page_size: Columns of a page.
    """
    return min(int(model.config.max_position_embeddings), pages * page_size)


def check_job(job: Job, model: Any, context: int) -> None:
    """Refuses what can never run.

    Args:
        job: What is asked.
        model: The looped model; its weights are not looked at.
        context: As `context_of` tells it.

    Raises:
        ValueError: Naming what does not fit.
    """
    columns = len(job.prompt_ids) + job.max_new_tokens
    if not job.prompt_ids or job.max_new_tokens < 1:
        raise ValueError("a request needs at least one prompt id and one new token")
    limit = model.config.max_position_embeddings
    if columns > limit:
        raise ValueError(f"{columns} tokens exceed the model's context of {limit}")
    if columns > context:
        raise ValueError(f"{columns} tokens exceed the {context} that this engine's K/V hold")
    size = model.config.vocab_size
    if max(job.prompt_ids) >= size or min(job.prompt_ids) < 0:
        # on CUDA such an id would end the whole process
        raise ValueError(f"the prompt holds an id outside of the model's {size}; its tokenizer does not fit it")
    model.exit_rule(job.exit_config)
