"""From what a higher level did right to files that a lower one loads: demonstrations, or a template of steps."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, field_validator

from sigma0.bench.core.conditions import Strict
from sigma0.bench.strategyqa.items import Item, read_json
from sigma0.bench.strategyqa.level import Prediction
from sigma0.bench.strategyqa.workflow import Function, Template, WorkflowTrace, check_parts, function_of, is_pattern

Rows = Sequence[tuple[Item, Prediction]]

# demonstrations that a prompt holds
MOST = 3
# a question, calls with what they returned, and the answer: no line but these, so that it can end no prompt early
_CALL = r"Calling \w+\(.*\)\.\.\.\n\.\.\.\w+ returned .*\n"
_FORM = re.compile(rf'>>> strategy_qa\(".*"\)\n(?:{_CALL})+Final answer: (?:Yes|No)\n')


class Demonstration(Strict, strict=True):
    """A trace of an item that is shown to a model, in the form of `registry.DEMONSTRATION`."""

    qid: str
    text: str

    @field_validator("text")
    @classmethod
    def _check(cls, text: str) -> str:
        if not _FORM.fullmatch(text):
            raise ValueError(f"no trace from '>>> strategy_qa(\"...\")' to 'Final answer: Yes' or No: {text[:60]!r}")
        return text


_DEMONSTRATIONS = TypeAdapter(Annotated[list[Demonstration], Field(min_length=1)])
_TEMPLATE = TypeAdapter(Template)


def distil_demonstrations(rows: Rows, most: int = MOST) -> list[Demonstration]:
    """The shortest demonstrations of right and audited traces, those of Yes and of No in turn.

    Raises:
        ValueError: If there is none, or a right prediction has no trace that can be shown.
    """
    result: dict[bool, list[Demonstration]] = {True: [], False: []}
    for item, prediction in _right(rows):
        trace = audited(prediction.trace)
        if trace is not None:
            result[item.answer].append(Demonstration(qid=item.qid, text=trace.to_icl_demo()))
    sides = (sorted(entry, key=lambda one: (len(one.text), one.qid)) for entry in result.values())
    chosen = [one for one in chain.from_iterable(zip_longest(*sides)) if one is not None][:most]
    if not chosen:
        raise ValueError(_nothing(rows))
    return chosen


def distil_template(rows: Rows) -> Template:
    """The most common pattern of right and audited traces; of equally common ones the shortest.

    Of a level that only plans its steps (L5) the plans are taken.

    Raises:
        ValueError: If there is none, or a right prediction has no trace that can be read.
    """
    result = [(item.qid, pattern) for item, prediction in _right(rows) if (pattern := _pattern(prediction.trace))]
    if not result:
        raise ValueError(_nothing(rows))
    counts = Counter(pattern for _, pattern in result)
    best = min(counts, key=lambda pattern: (-counts[pattern], len(pattern), pattern))
    # the others voted too
    return Template(best, tuple(qid for qid, _ in result))


def audited(trace: Mapping[str, Any]) -> WorkflowTrace | None:
    """The workflow of a prediction's trace; None where a step failed, or a conclusion does not rest on answers."""
    result = trace.get("workflow")
    if not isinstance(result, WorkflowTrace):
        raise ValueError(
            f"a trace with {', '.join(map(str, trace)) or 'nothing'} holds no answered steps: distil from a run of L2, "
            "L2-rag, L3 or L3-simple"
        )
    return None if result.misses or not result.grounded else result


def save(result: Sequence[Demonstration] | Template, path: Path) -> None:
    """Writes a file that `load_demonstrations` or `load_template` reads."""
    adapter: TypeAdapter[Any] = _TEMPLATE if isinstance(result, Template) else _DEMONSTRATIONS
    path.parent.mkdir(parents=True, exist_ok=True)
    values = adapter.dump_python(result, mode="json")
    path.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def load_demonstrations(path: Path) -> list[Demonstration]:
    """The demonstrations of a file, of which there is at least one."""
    return read_json(path, _DEMONSTRATIONS, "list of demonstrations")


def load_template(path: Path) -> Template:
    """The template of a file."""
    return read_json(path, _TEMPLATE, "template")


def _right(rows: Rows) -> list[tuple[Item, Prediction]]:
    return [(item, prediction) for item, prediction in rows if prediction.answer == item.answer]


def _pattern(trace: Mapping[str, Any]) -> tuple[Function, ...] | None:
    """Of an audited trace or of a plan; None where it did not pass, or has steps that no template holds."""
    steps = trace.get("steps")
    if isinstance(steps, list) and all(isinstance(step, str) for step in steps):
        if check_parts(steps) is not None:
            return None
        functions: tuple[Function, ...] = ("decompose", *map(function_of, steps), "combine_facts")
    else:
        result = audited(trace)
        if result is None:
            return None
        functions = result.pattern
    return functions if is_pattern(functions) else None


def _nothing(rows: Rows) -> str:
    right = len(_right(rows))
    return f"nothing to distil: of {len(rows)} predictions {right} are right, and no trace of these passes the audit"
