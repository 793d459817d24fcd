"""A span model for `check`: LettuceDetect, which marks what an answer's context does not bear out."""

from typing import Any

from sigma0.errors import needs_extra

DEFAULT = "KRLabsOrg/lettucedect-base-modernbert-en-v1"


class SpanSupport:
    """Support as the share of a claim that lies outside of unsupported spans.

    Args:
        model: A LettuceDetect token classifier: folder or hub id; safetensors weights are asked for.
        threshold: Confidence from which on a span counts.
        detector: A ready detector in place of one made from `model`.

    Raises:
        ValueError: If `lettucedetect` is not installed, or for a threshold outside [0, 1].
    """

    def __init__(self, model: str = DEFAULT, threshold: float = 0.5, detector: Any = None) -> None:
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold lies in [0, 1], got {threshold}")
        self._threshold = threshold
        if detector is None:
            with needs_extra("grounding"):
                from lettucedetect.models.inference import HallucinationDetector

                detector = HallucinationDetector(method="transformer", model_path=model)
        self._detector = detector

    def support(self, claim: str, evidence: str) -> float:
        """How far `evidence` supports `claim`, in [0, 1]."""
        if not claim:
            return 1.0
        spans = self._detector.predict(
            context=[evidence], answer=claim, output_format="spans", min_confidence=self._threshold
        )
        marked = {index for span in spans for index in range(span["start"], min(span["end"], len(claim)))}
        return 1.0 - len(marked) / len(claim)
