"""The verdict on an answer of one looped model, out of its tokens: the same for the library and the server."""

from collections.abc import Sequence

from sigma0.signals.confidence import ConfidenceModel
from sigma0.signals.evidence import Observed, evidence_of
from sigma0.signals.verdict import DoorPolicy, ReasonVerdict, aggregate, part_of, with_confidence


def judge_answer(
    tokens: Sequence[Observed],
    total_loops: int,
    policy: DoorPolicy,
    grounded: float | None,
    collapsed: bool,
    confidence_model: ConfidenceModel | None,
    prompt_ids: Sequence[int],
) -> ReasonVerdict:
    """The verdict on a finished answer.

    Args:
        tokens: Of the answer, at least one.
        total_loops: T.
        policy: Shares and thresholds.
        grounded: Groundedness of its text; None where nothing could be checked.
        collapsed: Whether it was ended because it repeated itself.
        confidence_model: Of the checkpoint; None leaves the confidence at exp(-mean entropy).
        prompt_ids: Of its prompt.
    """
    parts = [part_of(token.reason, token.depth, token.fate, token.proximity or 0.0, token.entropy) for token in tokens]
    verdict = aggregate(parts, policy, grounded)
    if collapsed:
        verdict = verdict.model_copy(update={"reason": "collapse", "converged": False})
    # what was fed without a reading is evidence of nothing
    read = [token for token in tokens if token.reason != "forced"]
    if confidence_model is None or not read:
        return verdict
    evidence = evidence_of(read, total_loops, grounded)
    strange = confidence_model.strangeness(evidence, prompt_ids) is not None
    return with_confidence(verdict, confidence_model.confidence(evidence), strange)
