"""A task of Inspect: the micro-world's questions, right where the answer names the key word."""

from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

QUESTIONS = Path(__file__).parent / "tasks" / "micro_world_answer.jsonl"


@task  # type: ignore[untyped-decorator]
def micro_world() -> Task:
    """Questions about held-out stories."""
    fields = FieldSpec(input="prompt", target="key", id="id")
    return Task(dataset=json_dataset(str(QUESTIONS), fields), solver=generate(max_tokens=32), scorer=includes())
