"""Text in, text out: `generate` and `stream`, with the depth of every token."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedTokenizerFast, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria

from sigma0.config import ExitConfig, Messages, OnCollapse, parse_on_collapse, switches
from sigma0.decode.detokenizer import IncrementalDetokenizer
from sigma0.decode.exits import ExitRule, exit_reason
from sigma0.decode.grammar.spec import parse_spec
from sigma0.decode.grammar.vocabulary import Constraint
from sigma0.decode.repetition import CollapseStop
from sigma0.decode.sampling_params import check_logit_bias
from sigma0.decode.token_loop import Exits, TokenLoop
from sigma0.decode.transfer import to_host
from sigma0.models.hf_generate import DepthGenerationMixin
from sigma0.models.limits import check_context
from sigma0.models.prompts import encode
from sigma0.signals.answer import judge_answer
from sigma0.signals.canary import Tighten
from sigma0.signals.confidence import ConfidenceModel
from sigma0.signals.generation import Generation, StopReason
from sigma0.signals.grounding.check import check
from sigma0.signals.savings import savings
from sigma0.signals.tokens import Floats, StreamedToken, Token, with_statistics
from sigma0.signals.verdict import DoorPolicy, patience_for

# generate() arguments that a stream of one sequence cannot take
REFUSED = (
    "assistant_model",
    "attention_mask",
    "custom_generate",
    "input_ids",
    "inputs",
    "inputs_embeds",
    "num_beams",
    "num_return_sequences",
    "penalty_alpha",
    "prompt_lookup_num_tokens",
    "streamer",
    "tokenizer",
)


class TextStream(Iterator[Token]):
    """Iterator of new tokens; `generation` is the whole continuation once the stream has ended.

    Args:
        loop: A token loop of one sequence.
        first: The exit of its last prompt token.
        tokenizer: Of the model.
        exit_config: The settings in force, for the exit reasons.
        stop: Stop strings, for the stop reason.
        context: Texts that the new text may be grounded in.
        policy: Thresholds for the verdict on the whole text.
        counterfactual_rule: Under `full` and `fixed`, the rule whose exits are reported as `would_have_met`.
        confidence_model: Of the checkpoint, for that verdict; None for none.
        prompt_ids: Of the prompt, which the model looks at.
    """

    def __init__(
        self,
        loop: TokenLoop,
        first: Exits,
        tokenizer: PreTrainedTokenizerFast,
        exit_config: ExitConfig,
        stop: tuple[str, ...],
        context: tuple[str, ...] = (),
        policy: DoorPolicy | None = None,
        counterfactual_rule: ExitRule | None = None,
        confidence_model: ConfidenceModel | None = None,
        prompt_ids: tuple[int, ...] = (),
    ) -> None:
        self._loop = loop
        self._emissions = loop.run(first)
        self._exit_config = exit_config
        self._stop = stop
        self._context = context
        self._policy = policy or DoorPolicy()
        self._counterfactual_rule = counterfactual_rule
        self._confidence_model = confidence_model
        self._prompt_ids = prompt_ids
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._prompt_tokens = int(loop.lengths[0])
        self._tokens: list[Token] = []
        self._done = False

    def __next__(self) -> Token:
        """The next token."""
        token = self._next()
        if self._loop.record is None:
            return token
        streamed = StreamedToken(token.id, token.text, token.depth, token.reason)
        return streamed.defer(partial(self._as_streamed, len(self._tokens) - 1))

    def finish(self) -> Generation:
        """Decodes the remaining tokens and returns the whole continuation."""
        while not self._done:
            self._next()
        return self.generation

    def _next(self) -> Token:
        if self._done:
            raise StopIteration
        (emission,) = next(self._emissions)
        if emission.last:
            text = self._detokenizer.end(emission.token_id)
            self._done = True
            next(self._emissions, None)
        else:
            text = self._detokenizer.add(emission.token_id)
        reason = exit_reason(self._exit_config.mode, emission.met, emission.diverged, emission.forced)
        token = Token(emission.token_id, text, emission.depth, reason)
        self._tokens.append(token)
        return token

    def _as_streamed(self, index: int, token: Token) -> Token:
        """The token with the statistics known when it was emitted: loops that ran later do not count."""
        # the first is read from a prompt that has run all its loops, and under `verify` every token is
        all_loops = index == 0 or self._exit_config.after_exit == "verify"
        (described,) = self._with_statistics([token], index, None if all_loops else token.depth)
        return described

    @property
    def loop_statistics(self) -> Tensor:
        """`decode.ops.STATISTICS` of every loop of the tokens so far, float32 `[n, T, 8]`; NaN where none was run.

        Raises:
            ValueError: Without `verdict=True`.
        """
        if self._loop.record is None:
            raise ValueError("no verdict was asked for: pass verdict=True")
        return self._loop.record.loops[0, : len(self._tokens)].cpu()

    @property
    def patience(self) -> int:
        """Loops of which the mildest fate is a token's."""
        return patience_for(self._policy, self._loop.rule.total_loops)

    @property
    def generation(self) -> Generation:
        """The whole continuation.

        Raises:
            ValueError: While tokens are still to come.
        """
        if not self._done:
            raise ValueError("the stream is not finished: read its tokens first")
        counts = self._loop.cache.counts
        depths = [token.depth for token in self._tokens]
        total_loops = self._loop.rule.total_loops
        saved = savings([depths], counts.passes, counts.rows, total_loops)
        text = "".join(token.text for token in self._tokens)
        tokens, verdict, grounding, policy = tuple(self._tokens), None, None, None
        if self._loop.record is not None:
            deepest = to_host(self._loop.record.deepest[0, : len(self._tokens)])
            tokens = self._with_statistics(self._tokens, 0, deepest=deepest)
            grounding = check(text, self._context)
            policy = self._policy
            verdict = judge_answer(
                tokens, total_loops, policy, grounding.score, bool(self._loop.collapsed), self._confidence_model,
                self._prompt_ids, self._stop_reason(text) == "length",
            )  # fmt: skip
        return Generation(
            text=text,
            tokens=tokens,
            stop_reason=self._stop_reason(text),
            mean_depth=saved.mean_depth,
            depth_saved=saved.depth_saved,
            passes_saved=saved.passes_saved,
            rows_saved=saved.rows_saved,
            total_loops=total_loops,
            prompt_tokens=self._prompt_tokens,
            loop_passes=counts.passes,
            loop_rows=counts.rows,
            prompt_rows=counts.prompt_rows,
            head_rows=counts.head_rows,
            verdict=verdict,
            grounding=grounding,
            policy=policy,
            tokens_forced=sum(token.reason == "forced" for token in tokens),
        )

    def _with_statistics(
        self, tokens: Sequence[Token], start: int, max_loops: int | None = None, deepest: Floats | None = None
    ) -> tuple[Token, ...]:
        """The tokens, of which the first has output index `start`, with their statistics."""
        record = self._loop.record
        assert record is not None
        where = slice(start, start + len(tokens))
        paths, fates, logit_stats = (
            to_host(part[0, where]) for part in (record.loops, record.fates, record.logit_stats)
        )
        rule = self._counterfactual_rule
        return with_statistics(tokens, paths, fates, logit_stats, self.patience, rule, max_loops, deepest)

    def _stop_reason(self, text: str) -> StopReason:
        if self._tokens[-1].id in self._loop.eos:
            return "eos"
        if any(string in text for string in self._stop):
            return "stop"
        if self._loop.collapsed:
            return "collapse"
        full = self._loop.max_length is not None and int(self._loop.lengths[0]) >= self._loop.max_length
        return "length" if full else "stop"


def stream(
    model: DepthGenerationMixin,
    tokenizer: PreTrainedTokenizerFast,
    prompt: str | Messages,
    *,
    exit_config: ExitConfig | Mapping[str, Any] | None = None,
    max_new_tokens: int = 64,
    stop: Sequence[str] = (),
    seed: int | None = None,
    verdict: bool | None = None,
    sources: Sequence[str] = (),
    policy: DoorPolicy | Mapping[str, Any] | None = None,
    special_tokens: bool = False,
    on_collapse: OnCollapse = "stop",
    schema: Any = None,
    regex: str | None = None,
    choice: Sequence[str] | None = None,
    grammar: str | None = None,
    logit_bias: Mapping[int, float] | None = None,
    **generate_kwargs: Any,
) -> TextStream:
    """Yields the new tokens as they are decoded.

    Args:
        model: A looped model.
        tokenizer: Its fast tokenizer.
        prompt: A string to be continued, or messages for the chat template.
        exit_config: The exit rule; by default the checkpoint's.
        max_new_tokens: New tokens at most, >= 1.
        stop: Strings that end the text.
        seed: Seed of the sampling; the global generator is left unchanged.
        verdict: Whether tokens carry statistics and the generation a verdict; None: the value of `SIGMA0_VERDICT`,
            which is on by default.
        sources: Texts that the answer may be grounded in, beside the prompt.
        policy: Thresholds of the verdict's doors; None: the checkpoint's (`model.door_policy`).
        special_tokens: Whether special tokens in the prompt are encoded as special; by default they are text, see
            `models.prompts.encode`.
        on_collapse: What happens when the text repeats itself (`decode.repetition.CollapseStop`): `stop` ends it, with
            the same text up to there as `ignore`; `tighten` raises repetition penalty and temperature meanwhile
            (`signals.canary.Tighten`), which changes the text; `ignore` lets it run.
        schema: The answer is JSON that this JSON Schema allows: an object, JSON text, or a pydantic model. This and the
            next three need the extra `structured`, and exclude each other.
        regex: The answer matches this regular expression.
        choice: The answer is one of these texts.
        grammar: The answer follows this grammar, in Lark's notation or in EBNF.
        logit_bias: What is added to the logits of ids wherever they are read, ahead of penalties, temperature and cuts.
        **generate_kwargs: For transformers' `generate`: `do_sample`, `temperature`, `logits_processor`, ...; and
            `runner`, as in `sigma0.load`.

    Returns:
        An iterator of `Token` whose `generation` sums up.

    Raises:
        ValueError: For a model that is not looped, an empty prompt, a context over the model's limit, or bad settings.
    """
    if not isinstance(model, DepthGenerationMixin):
        raise ValueError(f"{type(model).__name__} is not a looped model")
    refused = sorted(set(generate_kwargs) & set(REFUSED))
    if refused:
        raise ValueError(f"{', '.join(refused)} cannot be used here; call model.generate")
    if isinstance(stop, str):
        raise ValueError(f"stop takes a list of strings, got the string {stop!r}")
    if isinstance(sources, str):
        raise ValueError(f"sources takes a list of texts, got the string {sources[:40]!r}")
    policy = model.door_policy if policy is None else DoorPolicy.parse(policy)
    if not all(stop):
        raise ValueError("a stop string must not be empty")
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be a whole number of at least 1, got {max_new_tokens!r}")
    spec = parse_spec(schema, regex, choice, grammar)
    if spec is not None:
        generate_kwargs["grammar"] = Constraint(spec, tokenizer)
    if logit_bias:
        biases = check_logit_bias(logit_bias, int(model.config.vocab_size))
        generate_kwargs["sequence_bias"] = {(token_id,): bias for token_id, bias in biases}
    config = model.resolve_exit_config(exit_config)
    on_collapse = parse_on_collapse(on_collapse)
    ids = encode(tokenizer, prompt, special_tokens)
    check_context(model, ids.shape[1], max_new_tokens)
    if on_collapse == "tighten":
        others = generate_kwargs.get("logits_processor") or []
        generate_kwargs["logits_processor"] = LogitsProcessorList([*others, Tighten(ids.shape[1])])
    criteria = StoppingCriteriaList(generate_kwargs.pop("stopping_criteria", None) or [])
    if stop:
        criteria.append(StopStringCriteria(tokenizer, list(stop)))
    ids = ids.to(model.device)
    with torch.random.fork_rng(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        loop, first = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            exit_config=config,
            stopping_criteria=criteria,
            custom_generate=type(model).open_token_loop,
            output_statistics=switches().verdict if verdict is None else verdict,
            **generate_kwargs,
        )
    if on_collapse == "stop":
        loop.collapse = CollapseStop()
    context = (tokenizer.decode(ids[0], skip_special_tokens=True), *sources)
    rule = model.counterfactual_rule(config)
    return TextStream(
        loop, first, tokenizer, config, tuple(stop), context, policy, rule, model.confidence_model,
        tuple(ids[0].tolist()),
    )  # fmt: skip


class Ladder(Protocol):
    """Larger models for answers that do not converge: a `sigma0.ladder.FidelityLadder`.

    Attributes:
        doors: Thresholds of its converge door.
    """

    doors: DoorPolicy

    def take_over(self, prompt: str | Messages, written: Generation, **settings: Any) -> Any:
        """The `LadderGeneration` of the rungs above."""


def generate(
    model: DepthGenerationMixin,
    tokenizer: PreTrainedTokenizerFast,
    prompt: str | Messages,
    *,
    ladder: Ladder | None = None,
    **kwargs: Any,
) -> Generation:
    """Continues a prompt.

    Args:
        model: A looped model.
        tokenizer: Its fast tokenizer.
        prompt: A string to be continued, or messages for the chat template.
        ladder: Continues with larger models if the verdict does not converge and `SIGMA0_LADDER=1`; its lowest rung
            should be this model. Text, verdict and door are then those of the final answer, `draft` is what this model
            had written, and `above` the ladder's whole result.
        **kwargs: Keyword arguments of `stream`.

    Returns:
        Text, tokens, depths and savings.

    Raises:
        ValueError: As `stream` does.
    """
    constrained = [name for name in ("schema", "regex", "choice", "grammar") if kwargs.get(name) is not None]
    if ladder is not None and constrained:
        raise ValueError(f"a ladder's rungs follow no {constrained[0]}: leave it out, or the ladder")
    if ladder is not None and kwargs.get("special_tokens"):
        raise ValueError("a ladder reads special tokens as text: leave special_tokens out, or the ladder")
    tokens = stream(model, tokenizer, prompt, **kwargs)
    written = tokens.finish()
    if ladder is not None and not switches().ladder:
        warnings.warn("a ladder is given, but SIGMA0_LADDER is not 1: no answer goes up", stacklevel=2)
    if ladder is None or not switches().ladder or written.door in (None, "converge"):
        return written
    settings = {name: kwargs[name] for name in ("max_new_tokens", "stop", "sources") if name in kwargs}
    return written.handed_up(ladder.take_over(prompt, written, **settings), ladder.doors)
