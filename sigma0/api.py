"""Text in, text out: `generate` and `stream`, with the depth of every token."""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
import torch
from jinja2 import TemplateError
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria

from sigma0.config import ExitConfig, OnCollapse, parse_on_collapse, switches
from sigma0.decode.exits import ExitRule, exit_reason
from sigma0.decode.ops import FATES, READINGS, STATISTICS
from sigma0.decode.repetition import CollapseStop
from sigma0.decode.step import Exits
from sigma0.decode.token_loop import Emission, TokenLoop
from sigma0.decode.transfer import to_host
from sigma0.models.hf_generate import DepthGenerationMixin
from sigma0.models.limits import check_context as check_context
from sigma0.models.special_tokens import text_encoder
from sigma0.signals.canary import Tighten
from sigma0.signals.grounding.check import Grounding, check
from sigma0.signals.savings import savings
from sigma0.signals.tokens import StreamedToken, Token
from sigma0.signals.verdict import Door, DoorPolicy, ReasonVerdict, aggregate, door, mildest, patience_for

Messages = Sequence[Mapping[str, Any]]
StopReason = Literal["eos", "stop", "length", "collapse"]
# generate() arguments that would change what a stream of one sequence is
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


@dataclass(frozen=True)
class Generation:
    """A finished continuation.

    Attributes:
        text: The new text, special tokens left out.
        tokens: The new tokens, a final EOS included.
        stop_reason: `eos`, `stop` (a stop string or a caller's criterion), `length`, or `collapse`: it ran in circles
            and was ended, with what it had written so far.
        mean_depth: Mean exit depth of the tokens after the first; None for a single token.
        depth_saved: See `sigma0.signals.savings.Savings`, as are the next two.
        passes_saved: Passes saved.
        rows_saved: Rows saved.
        total_loops: T.
        prompt_tokens: Ids of the prompt.
        loop_passes: Calls of the shared block after the prompt.
        loop_rows: Rows in those calls.
        prompt_rows: Rows that reading the prompt took.
        head_rows: Rows that the output head read after the prompt.
        verdict: On the whole text; None where none is asked for.
        grounding: The claims of the text, looked up in prompt and sources; None likewise.
        policy: What its door asks for; None likewise.
        above: What a ladder made of it (a `LadderGeneration`); None where none was asked.
    """

    text: str
    tokens: tuple[Token, ...]
    stop_reason: StopReason
    mean_depth: float | None
    depth_saved: float | None
    passes_saved: float | None
    rows_saved: float | None
    total_loops: int
    prompt_tokens: int
    loop_passes: int
    loop_rows: int
    prompt_rows: int
    head_rows: int
    verdict: ReasonVerdict | None = None
    grounding: Grounding | None = None
    policy: DoorPolicy | None = None
    above: Any = None

    @property
    def answer(self) -> str:
        """The text that stands: a ladder's where it was asked, else this one."""
        return self.text if self.above is None else str(self.above.text)

    @property
    def door(self) -> Door | None:
        """The door that the verdict opens while budget is left; None where there is no verdict."""
        return None if self.verdict is None else door(self.verdict, self.policy)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; what a verdict needs is left out where none was asked for."""
        values = asdict(replace(self, above=None))
        verdict, _ = values.pop("verdict"), values.pop("above")
        if self.above is not None:
            values["above"] = self.above.to_dict()
        if verdict is None:
            del values["grounding"], values["policy"]
            values["tokens"] = [{name: token[name] for name in _ALWAYS} for token in values["tokens"]]
            return values
        return {**values, "verdict": verdict.to_dict(), "door": self.door}


_ALWAYS = ("id", "text", "depth", "reason")


_RADIUS, _ANGLE = STATISTICS.index("radius"), STATISTICS.index("angle")
_PROXIMITY, _MARGIN, _ENTROPY = (READINGS.index(name) for name in ("proximity", "margin", "entropy"))


class TextStream(Iterator[Token]):
    """New tokens as they come; `generation` sums up once they have all come.

    Args:
        loop: A token loop of one sequence.
        first: The exit of its last prompt token.
        tokenizer: A fast tokenizer.
        exit_config: The settings in force, for the reasons.
        stop: Stop strings, to tell `stop` from `length`.
        context: What the text is to be grounded in.
        policy: How token verdicts become one.
        unasked: The rule that would have stopped tokens, where `full` or `fixed` does.
    """

    def __init__(
        self,
        loop: TokenLoop,
        first: Exits,
        tokenizer: Any,
        exit_config: ExitConfig,
        stop: tuple[str, ...],
        context: tuple[str, ...] = (),
        policy: DoorPolicy | None = None,
        unasked: ExitRule | None = None,
    ) -> None:
        self._loop = loop
        self._emissions = loop.run(first)
        self._tokenizer = tokenizer
        self._exit_config = exit_config
        self._stop = stop
        self._context = context
        self._policy = policy or DoorPolicy()
        self._unasked = unasked
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._prompt_tokens = int(loop.lengths[0])
        self._tokens: list[Token] = []
        self._done = False

    def __next__(self) -> Token:
        """The next token."""
        token = self._next()
        if self._loop.record is None:
            return token
        streamed = StreamedToken(token.id, token.text, token.depth, token.reason)
        return streamed.wait(partial(self._as_streamed, len(self._tokens) - 1))

    def finish(self) -> Generation:
        """Writes the rest, and sums up."""
        while not self._done:
            self._next()
        return self.generation

    def _next(self) -> Token:
        if self._done:
            raise StopIteration
        (emission,) = next(self._emissions)
        text = self._decoder.step(self._tokenizer.backend_tokenizer, emission.token_id) or ""
        if emission.last:
            text = self._rest(emission)
            self._done = True
            next(self._emissions, None)
        reason = exit_reason(self._exit_config.mode, emission.met, emission.diverged)
        token = Token(emission.token_id, text, emission.depth, reason)
        self._tokens.append(token)
        return token

    def _as_streamed(self, number: int, token: Token) -> Token:
        """The token with what was known of it when it came: loops that ran later do not count."""
        # the first is read from a prompt that has run all its loops, and under `verify` every token is
        all_loops = number == 0 or self._exit_config.after_exit == "verify"
        (told,) = self._with_statistics([token], number, None if all_loops else token.depth)
        return told

    @property
    def loop_statistics(self) -> Tensor:
        """Of every loop of the tokens so far (`decode.ops.STATISTICS`), float32 `[n, T, 8]`; NaN where none was run.

        Raises:
            ValueError: Where no verdict was asked for.
        """
        if self._loop.record is None:
            raise ValueError("no verdict was asked for: pass verdict=True")
        return self._loop.record.loops[0, : len(self._tokens)].cpu()

    @property
    def patience(self) -> int:
        """Loops of which the mildest fate is a token's."""
        return patience_for(self._policy, self._loop.wave.rule.total_loops)

    @property
    def generation(self) -> Generation:
        """The whole continuation.

        Raises:
            ValueError: While tokens are still to come.
        """
        if not self._done:
            raise ValueError("the stream is not finished: read its tokens first")
        counts = self._loop.wave.cache.counts
        depths = [token.depth for token in self._tokens]
        total_loops = self._loop.wave.rule.total_loops
        saved = savings([depths], counts.passes, counts.rows, total_loops)
        text = "".join(token.text for token in self._tokens)
        tokens, verdict, grounding, policy = tuple(self._tokens), None, None, None
        if self._loop.record is not None:
            tokens = self._with_statistics(self._tokens, 0)
            grounding = check(text, self._context)
            policy = self._policy
            verdict = aggregate([token.verdict for token in tokens], policy, grounding.score)
            if self._loop.collapsed:
                verdict = verdict.model_copy(update={"reason": "collapse", "converged": False})
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
        )

    def _with_statistics(self, tokens: Sequence[Token], first: int, loops: int | None = None) -> tuple[Token, ...]:
        """The tokens, of which the first has number `first`, with what the record tells of them.

        Args:
            tokens: One after the other.
            first: Number of the first.
            loops: How many of each one's loops count; None: all that were run.
        """
        record = self._loop.record
        assert record is not None
        where = slice(first, first + len(tokens))
        paths, fates, readings = (to_host(part[0, where]) for part in (record.loops, record.fates, record.readings))
        ran = np.isfinite(paths[:, :, 0]).sum(axis=1)
        if loops is not None:
            ran = np.minimum(ran, loops)
        last = paths[np.arange(len(paths)), ran - 1]  # [N, 8]
        numbers = np.stack([last[:, _RADIUS], last[:, _ANGLE], *readings[:, [_PROXIMITY, _MARGIN, _ENTROPY]].T], axis=1)
        rule, described = self._unasked, []
        for token, path, row, known, count in zip(
            tokens, paths, numbers.tolist(), fates.tolist(), ran.tolist(), strict=True
        ):
            radius, angle, proximity, margin, entropy = map(_finite, row)
            fate = mildest([FATES[code] for code in known[:count]], self.patience)
            met = None if rule is None else rule.would_have_been_met(path[:count], margin)
            figures = (radius, angle, fate, proximity, margin, entropy, met)
            described.append(Token(token.id, token.text, token.depth, token.reason, *figures))
        return tuple(described)

    def _rest(self, emission: Emission) -> str:
        """What the last token adds, an unfinished character included."""
        ids = [*(token.id for token in self._tokens), emission.token_id]
        whole = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(whole[sum(len(token.text) for token in self._tokens) :])

    def _stop_reason(self, text: str) -> StopReason:
        if self._tokens[-1].id in self._loop.eos:
            return "eos"
        if any(string in text for string in self._stop):
            return "stop"
        if self._loop.collapsed:
            return "collapse"
        full = self._loop.max_length is not None and int(self._loop.lengths[0]) >= self._loop.max_length
        return "length" if full else "stop"


def _finite(value: float) -> float | None:
    """A number that JSON can hold; None where a broken model has none."""
    return value if math.isfinite(value) else None


def encode(tokenizer: Any, prompt: str | Messages, special_tokens: bool = False) -> Tensor:
    """Ids `[1, P]` of a prompt: a string is continued as it is, messages go through the chat template.

    A last message of the assistant is taken for the beginning of its answer, and continued.

    Args:
        tokenizer: A fast transformers tokenizer.
        prompt: A string, or messages with `role` and `content`.
        special_tokens: Whether a special token in the prompt (say `<|im_end|>`) is that token; by default it is text,
            and only the chat template's own are special.

    Raises:
        ValueError: For an empty prompt, a tokenizer without a chat template, or one that is not fast.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"a fast tokenizer is needed, got {type(tokenizer).__name__}")
    if not isinstance(prompt, str) and (
        not isinstance(prompt, Sequence) or not all(isinstance(message, Mapping) for message in prompt)
    ):
        raise ValueError(f"a prompt is a string or a list of messages, got {type(prompt).__name__}")
    if not prompt:
        raise ValueError("the prompt is empty")
    if isinstance(prompt, str):
        if not special_tokens:
            return torch.tensor([text_encoder(tokenizer).text(prompt)], dtype=torch.long)
        # verbose=False: a text over the limit is told by our own error
        ids = tokenizer(prompt, return_tensors="pt", verbose=False)["input_ids"]
    elif tokenizer.chat_template is None:
        raise ValueError("this tokenizer has no chat template; pass the prompt as one string")
    else:
        # a turn of the assistant at the end is not over: it is continued
        open_turn = prompt[-1].get("role") == "assistant"
        template = {"add_generation_prompt": not open_turn, "continue_final_message": open_turn}

        def render(messages: list[dict[str, Any]]) -> str:
            return str(tokenizer.apply_chat_template(messages, tokenize=False, **template))

        try:
            if not special_tokens:
                return torch.tensor([text_encoder(tokenizer).messages(prompt, render)], dtype=torch.long)
            messages = [dict(message) for message in prompt]
            ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True, **template)[
                "input_ids"
            ]
        except TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
    encoded: Tensor = ids
    if not encoded.numel():
        raise ValueError(f"the prompt has no tokens: {prompt!r:.60}")
    return encoded


def stream(
    model: Any,
    tokenizer: Any,
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
    **generate_kwargs: Any,
) -> TextStream:
    """Yields the new tokens as they come.

    Args:
        model: A looped model.
        tokenizer: Its fast tokenizer.
        prompt: A string to be continued as it is, or messages for the chat template.
        exit_config: When tokens stop; by default as the checkpoint says.
        max_new_tokens: New tokens at most, >= 1.
        stop: Strings that end the text.
        seed: Seed of the sampling; the global generator stays as it is.
        verdict: Whether tokens tell their statistics and the generation has a verdict; None: as `SIGMA0_VERDICT` says,
            which is on by default.
        sources: Texts that the answer may be grounded in, beside the prompt.
        policy: What the verdict's doors ask for; None: as the checkpoint says (`model.door_policy`).
        special_tokens: Whether special tokens in the prompt are those tokens; by default they are text (see `encode`).
        on_collapse: What becomes of a text that runs in circles (`decode.repetition.CollapseStop`): `stop` ends it, and
            what it wrote until then is what it writes with `ignore`; `tighten` raises repetition penalty and
            temperature while it does (`signals.canary.Tighten`), which writes another text; `ignore` lets it run.
        **generate_kwargs: For transformers' `generate`: `do_sample`, `temperature`, `logits_processor`, ...

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
    read = tokenizer.decode(ids[0], skip_special_tokens=True)
    return TextStream(loop, first, tokenizer, config, tuple(stop), (read, *sources), policy, model.unasked_rule(config))


class Ladder(Protocol):
    """What takes answers over whose door stays shut: a `sigma0.ladder.FidelityLadder`."""

    def take_over(self, prompt: str | Messages, written: Generation, **settings: Any) -> Any:
        """A `LadderGeneration` of the rungs above."""


def generate(
    model: Any, tokenizer: Any, prompt: str | Messages, *, ladder: Ladder | None = None, **kwargs: Any
) -> Generation:
    """Continues a prompt.

    Args:
        model: A looped model.
        tokenizer: Its fast tokenizer.
        prompt: A string to be continued as it is, or messages for the chat template.
        ladder: Takes the answer over if its door stays shut and `SIGMA0_LADDER=1`; its lowest rung should be this
            model. What it made of it is `above`, and `answer` the text that stands.
        **kwargs: As `stream` takes them.

    Returns:
        Text, tokens, depths and savings.

    Raises:
        ValueError: As `stream` does.
    """
    if ladder is not None and kwargs.get("special_tokens"):
        raise ValueError("a ladder reads special tokens as text: leave special_tokens out, or the ladder")
    tokens = stream(model, tokenizer, prompt, **kwargs)
    written = tokens.finish()
    if ladder is not None and not switches().ladder:
        warnings.warn("a ladder is given, but SIGMA0_LADDER is not 1: no answer goes up", stacklevel=2)
    if ladder is None or not switches().ladder or written.door in (None, "converge"):
        return written
    told = {name: kwargs[name] for name in ("max_new_tokens", "stop", "sources") if name in kwargs}
    return replace(written, above=ladder.take_over(prompt, written, **told))
