"""Text in, text out: `generate` and `stream`, with the depth of every token."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from jinja2 import TemplateError
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria

from sigma0.decoding import Emission, TokenLoop
from sigma0.exits import Reason, exit_reason
from sigma0.generation import DepthGenerationMixin
from sigma0.grounding import Grounding, check
from sigma0.limits import check_context as check_context
from sigma0.ops import FATES, READINGS, STATISTICS, Fate
from sigma0.savings import savings
from sigma0.settings import ExitConfig, switches
from sigma0.transfer import to_host
from sigma0.verdict import Door, DoorPolicy, ReasonVerdict, aggregate, door, mildest, of_token, patience_for
from sigma0.wave import Exits

Messages = Sequence[Mapping[str, Any]]
StopReason = Literal["eos", "stop", "length"]
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
class Token:
    """A new token.

    Attributes:
        id: Its id.
        text: What it adds to the text; "" for special tokens and for bytes of a character that is not complete yet.
        depth: Loop at which it was read, from 1.
        reason: Why it stopped there, as `sigma0.exits.exit_reason` names it.
        radius: Of the spectrum of its loops so far, as are the next two; None, like all below, where no verdict is
            asked for. In a finished generation the loops that ran behind its exit count too.
        angle: Radians.
        fate: The mildest of its last loops; None where too few were run.
        proximity: How near the text was to running in circles.
        margin: Lead of the likeliest id; None also where the logits are no numbers, as is the next.
        entropy: Of the distribution, nats.
    """

    id: int
    text: str
    depth: int
    reason: Reason
    radius: float | None = None
    angle: float | None = None
    fate: Fate | None = None
    proximity: float | None = None
    margin: float | None = None
    entropy: float | None = None

    @property
    def verdict(self) -> ReasonVerdict:
        """On this token alone.

        Raises:
            ValueError: Where no verdict was asked for.
        """
        if self.proximity is None:
            raise ValueError("no verdict was asked for: pass verdict=True")
        return of_token(self.reason, self.depth, self.fate, self.proximity)


@dataclass(frozen=True)
class Generation:
    """A finished continuation.

    Attributes:
        text: The new text, special tokens left out.
        tokens: The new tokens, a final EOS included.
        stop_reason: `eos`, `stop` (a stop string or a caller's criterion) or `length`.
        mean_depth: Mean exit depth of the tokens after the first; None for a single token.
        depth_saved: See `sigma0.savings.Savings`, as are the next two.
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
    ) -> None:
        self._loop = loop
        self._emissions = loop.run(first)
        self._tokenizer = tokenizer
        self._exit_config = exit_config
        self._stop = stop
        self._context = context
        self._policy = policy or DoorPolicy()
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._prompt_tokens = int(loop.lengths[0])
        self._tokens: list[Token] = []
        self._done = False

    def __next__(self) -> Token:
        """The next token."""
        (emission,) = next(self._emissions)
        text = self._decoder.step(self._tokenizer.backend_tokenizer, emission.token_id) or ""
        if emission.last:
            text = self._rest(emission)
            self._done = True
            next(self._emissions, None)
        reason = exit_reason(self._exit_config.mode, emission.met, emission.diverged)
        token = Token(emission.token_id, text, emission.depth, reason)
        if self._loop.record is not None:
            (token,) = self._with_statistics([token], len(self._tokens))
        self._tokens.append(token)
        return token

    @property
    def loop_statistics(self) -> Tensor:
        """Of every loop of the tokens so far (`sigma0.ops.STATISTICS`), float32 `[n, T, 8]`; NaN where none was run.

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

    def _with_statistics(self, tokens: Sequence[Token], first: int) -> tuple[Token, ...]:
        """The tokens, of which the first has number `first`, with what the record tells of them so far."""
        record = self._loop.record
        assert record is not None
        where = slice(first, first + len(tokens))
        loops, fates, readings = (to_host(part[0, where]) for part in (record.loops, record.fates, record.readings))
        told = []
        for token, path, known, reading in zip(tokens, loops, fates, readings, strict=True):
            ran = int(np.isfinite(path[:, 0]).sum())
            told.append(
                replace(
                    token,
                    radius=_finite(path[ran - 1, _RADIUS]),
                    angle=_finite(path[ran - 1, _ANGLE]),
                    fate=mildest([FATES[fate] for fate in known[:ran].tolist()], self.patience),
                    proximity=_finite(reading[_PROXIMITY]),
                    margin=_finite(reading[_MARGIN]),
                    entropy=_finite(reading[_ENTROPY]),
                )
            )
        return tuple(told)

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
        full = self._loop.max_length is not None and int(self._loop.lengths[0]) >= self._loop.max_length
        return "length" if full else "stop"


def _finite(value: Any) -> float | None:
    """A number that JSON can hold; None where a broken model has none."""
    return float(value) if np.isfinite(value) else None


def encode(tokenizer: Any, prompt: str | Messages) -> Tensor:
    """Ids `[1, P]` of a prompt: a string is continued as it is, messages go through the chat template.

    A last message of the assistant is taken for the beginning of its answer, and continued.

    Args:
        tokenizer: A fast transformers tokenizer.
        prompt: A string, or messages with `role` and `content`.

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
        # verbose=False: a text over the limit is told by our own error
        ids = tokenizer(prompt, return_tensors="pt", verbose=False)["input_ids"]
    elif tokenizer.chat_template is None:
        raise ValueError("this tokenizer has no chat template; pass the prompt as one string")
    else:
        try:
            # a turn of the assistant at the end is not over: it is continued
            open_turn = prompt[-1].get("role") == "assistant"
            ids = tokenizer.apply_chat_template(
                [dict(message) for message in prompt],
                add_generation_prompt=not open_turn,
                continue_final_message=open_turn,
                return_tensors="pt",
                return_dict=True,
            )["input_ids"]
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
    ids = encode(tokenizer, prompt)
    check_context(model, ids.shape[1], max_new_tokens)
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
    read = tokenizer.decode(ids[0], skip_special_tokens=True)
    return TextStream(loop, first, tokenizer, config, tuple(stop), (read, *sources), policy)


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
    tokens = stream(model, tokenizer, prompt, **kwargs)
    for _ in tokens:
        pass
    written = tokens.generation
    if ladder is not None and not switches().ladder:
        warnings.warn("a ladder is given, but SIGMA0_LADDER is not 1: no answer goes up", stacklevel=2)
    if ladder is None or not switches().ladder or written.door in (None, "converge"):
        return written
    told = {name: kwargs[name] for name in ("max_new_tokens", "stop", "sources") if name in kwargs}
    return replace(written, above=ladder.take_over(prompt, written, **told))
