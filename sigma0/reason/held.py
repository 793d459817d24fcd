"""A model without loops held to a grammar, id by id, in transformers' own generation."""

from typing import cast

import torch
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerFast

from sigma0.decode.detokenizer import eos_ids
from sigma0.decode.grammar.compiled import CompiledGrammar
from sigma0.decode.grammar.spec import parse_spec
from sigma0.decode.grammar.vocabulary import vocabulary_of


class GrammarProcessor(LogitsProcessor):  # type: ignore[misc]
    """Leaves the ids that a grammar allows; of one sequence, without beams.

    Args:
        grammar: Compiled for the model's vocabulary.
        start: Ids of the prompt.
    """

    def __init__(self, grammar: CompiledGrammar, start: int) -> None:
        self._matcher = grammar.matcher()
        self._start = start

    @classmethod
    def of(
        cls, grammar: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, start: int
    ) -> "GrammarProcessor":
        """Of a grammar in Lark's notation.

        Raises:
            ValueError: If it cannot be enforced, in one line; without llguidance, with the way out.
        """
        spec = parse_spec(grammar=grammar)
        assert spec is not None
        size = model.get_output_embeddings().weight.shape[0]
        ends = eos_ids(model.generation_config.eos_token_id)
        return cls(vocabulary_of(tokenizer, size, ends).compile(spec), start)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Scores `[1, V]` with -inf for what may not follow `input_ids` `[1, S]`."""
        if input_ids.shape[0] != 1:
            raise ValueError(f"a grammar holds one sequence here, got {input_ids.shape[0]}")
        for token_id in input_ids[0, self._start + self._matcher.count :].tolist():
            self._matcher.take(token_id)
        bits = torch.from_numpy(self._matcher.mask())
        places = torch.arange(scores.shape[1])
        allowed = (bits[places >> 5] >> (places & 31)) & 1
        held = scores.masked_fill(~allowed.bool().to(scores.device), float("-inf"))
        return cast(torch.FloatTensor, held)
