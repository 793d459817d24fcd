"""The verdict on an answer of one looped model, out of its tokens: the same for the library and the server."""

from collections.abc import Sequence

from sigma0.signals.confidence import ConfidenceModel
from sigma0.signals.evidence import Floats, Observed, evidence_of
from sigma0.signals.verdict import DoorPolicy, ReasonVerdict, aggregate, part_of, with_confidence


def judge_answer(
    tokens: Sequence[Observed],
    total_loops: int,
    policy: DoorPolicy,
    grounded: float | None,
    collapsed: bool,
    confidence_model: ConfidenceModel | None,
    prompt_ids: Sequence[int],
    cut: bool = False,
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
        cut: Whether it was ended by the most tokens that were asked for, and not by the model: a beginning that is
            shorter than the answers of the calibration has no calibrated confidence.
    """
    verdict = plain_verdict(tokens, policy, grounded, collapsed)
    evidence = None if confidence_model is None else evidence_of_read(tokens, total_loops, grounded)
    if confidence_model is None or evidence is None:
        return verdict
    judged = under_model(verdict, evidence, confidence_model, prompt_ids)
    # the calibration cut no answer so short: what has begun well says nothing of the whole
    is_beginning = cut and len(tokens) < confidence_model.longest
    return judged.model_copy(update={"confidence": None}) if is_beginning else judged


def plain_verdict(
    tokens: Sequence[Observed], policy: DoorPolicy, grounded: float | None, collapsed: bool
) -> ReasonVerdict:
    """The verdict without a calibrated confidence; arguments as `judge_answer` has them."""
    parts = [part_of(token.reason, token.depth, token.fate, token.proximity or 0.0, token.entropy) for token in tokens]
    verdict = aggregate(parts, policy, grounded)
    return verdict.model_copy(update={"reason": "collapse", "converged": False}) if collapsed else verdict


def evidence_of_read(tokens: Sequence[Observed], total_loops: int, grounded: float | None) -> Floats | None:
    """Features of an answer, `[F]`; None of one that was only fed: what had no reading is evidence of nothing."""
    read = [token for token in tokens if token.reason != "forced"]
    return evidence_of(read, total_loops, grounded) if read else None


def under_model(
    verdict: ReasonVerdict, evidence: Floats, model: ConfidenceModel, prompt_ids: Sequence[int]
) -> ReasonVerdict:
    """A plain verdict under a calibrated confidence.

    Args:
        verdict: On an answer.
        evidence: Of it, `[F]`.
        model: Of the checkpoint.
        prompt_ids: Of its prompt.
    """
    strange = model.strangeness(evidence, prompt_ids) is not None
    return with_confidence(verdict, model.confidence(evidence), strange)
