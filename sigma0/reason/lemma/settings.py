"""What a user may ask of the lemma graph."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from sigma0.config import Effort
from sigma0.errors import one_line

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
_FORBID = ConfigDict(extra="forbid")


@checked(frozen=True, config=_FORBID)
class LemmaEfforts:
    """Effort of each kind of question.

    Attributes:
        plan: Of plans, and of new lemmas in them.
        prove: Of proofs, and of a guess where there is none.
        check: Of objections, and of the judgement on them.
        code: Of programs.
    """

    plan: Effort = "medium"
    prove: Effort = "low"
    check: Effort = "medium"
    code: Effort = "low"


@checked(frozen=True, config=_FORBID)
class LemmaSettings:
    """How a problem is solved lemma by lemma.

    Attributes:
        max_tokens: New tokens of each answer at most, >= 1.
        temperature: 0 is greedy.
        repairs: New attempts at a lemma that failed, before the plan is changed; again after that.
        restructures: Changes of the plan in all.
        workers: Lemmas proved at a time, >= 1; the result does not depend on it, save where a limit of the run ends it.
        calls_per_lemma: Questions about one lemma at most, >= 1; a label that is asked for again counts once.
        escalations: Proofs asked again of the larger model in all.
        code_timeout_s: Seconds for each program, above 0.
        memory_mb: Memory for each program, in MB; at least 48, which an interpreter needs.
        efforts: By kind of question.
    """

    max_tokens: Positive = 512
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] = 0.0
    repairs: Count = 2
    restructures: Count = 1
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    calls_per_lemma: Positive = 32
    escalations: Count = 3
    code_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0
    memory_mb: Annotated[int, Field(ge=48)] = 512
    efforts: LemmaEfforts = Field(default_factory=LemmaEfforts)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dict(_SETTINGS.dump_python(self, mode="json"))

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "LemmaSettings":
        """The same out of JSON values.

        Raises:
            ValueError: For an unknown key or a bad value, naming it.
        """
        try:
            return _SETTINGS.validate_python(dict(value))
        except ValidationError as error:
            raise ValueError(one_line(error)) from error


_SETTINGS = TypeAdapter(LemmaSettings)
