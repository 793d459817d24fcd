"""Chat models: a model in this process, a ladder, an endpoint, and a script for tests."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from threading import Lock
from typing import Any, Literal

import torch
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerFast

from sigma0.api import generate
from sigma0.config import Effort, ExitConfig, Messages, exit_for
from sigma0.decode.detokenizer import eos_ids, truncate_at_stop
from sigma0.errors import needs_extra
from sigma0.ladder import Budget, FidelityLadder, LocalRung, Rung, RungCost
from sigma0.ladder.budget import BudgetTracker
from sigma0.ladder.endpoint import EndpointClient
from sigma0.ladder.rungs import AnyRung, at_effort
from sigma0.models.hf_generate import DepthGenerationMixin
from sigma0.models.limits import check_context
from sigma0.models.prompts import encode
from sigma0.reason.held import GrammarProcessor
from sigma0.reason.messages import DEFAULTS, ChatFailed, ChatModel, ChatSettings, Chooser, Completion, Usage

__all__ = [
    "ChatFailed",
    "ChatModel",
    "ChatSettings",
    "Chooser",
    "Completion",
    "EndpointChat",
    "LadderChat",
    "LocalChat",
    "ScriptedChat",
    "Usage",
]


class LocalChat:
    """A causal model of transformers in this process, looped or not; one call at a time.

    Args:
        model: LoopOutput models have verdicts, and effort is depth; of others effort changes nothing.
        tokenizer: Its fast tokenizer, with a chat template.
        name: In trails.
        exit_config: A looped model's setting at effort `medium`; by default as its checkpoint says.

    Raises:
        ValueError: For a tokenizer without a chat template, an exit setting of a model without loops, or a bad one.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        name: str,
        exit_config: ExitConfig | Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.model = model
        self.tokenizer = tokenizer
        self.is_looped = isinstance(model, DepthGenerationMixin)
        if tokenizer.chat_template is None:
            raise ValueError(f"{name!r} has no chat template, so that it cannot be asked in messages")
        if exit_config is not None and not self.is_looped:
            raise ValueError(f"{name!r} has no loops to exit from: leave the exit setting out")
        self._own = model.resolve_exit_config(exit_config) if self.is_looped else None
        self._alone = Lock()

    def complete(self, messages: Messages, settings: ChatSettings = DEFAULTS) -> Completion:
        """See `ChatModel`."""
        sampling: dict[str, Any] = {"do_sample": settings.temperature > 0}
        if settings.temperature > 0:
            sampling["temperature"] = settings.temperature
        if settings.grammar is not None and self.is_looped:
            sampling["grammar"] = settings.grammar
        elif settings.grammar is not None:
            start = encode(self.tokenizer, messages).shape[1]
            held = GrammarProcessor.of(settings.grammar, self.model, self.tokenizer, start)
            sampling["logits_processor"] = LogitsProcessorList([held])
        return self._write(messages, settings, sampling)

    def choose(
        self, messages: Messages, labels: Sequence[str], *, effort: Effort = "low", seed: int | None = None
    ) -> tuple[str, Completion]:
        """See `Chooser`; greedy."""
        ways = label_ways(self.tokenizer, labels)
        start = encode(self.tokenizer, messages).shape[1]
        ends = sorted(eos_ids(self.model.generation_config.eos_token_id)) or [0]

        def allowed(_: int, ids: Any) -> list[int]:
            so_far = tuple(ids[start:].tolist())
            return sorted({way[len(so_far)] for way in ways if way[: len(so_far)] == so_far < way}) or ends

        longest = max(map(len, ways)) + 1
        settings = ChatSettings(effort, longest, seed=seed)
        completion = self._write(messages, settings, {"prefix_allowed_tokens_fn": allowed}, longest)
        label = completion.text.strip()
        assert label in labels, (label, labels)
        return label, completion

    def _write(
        self, messages: Messages, settings: ChatSettings, sampling: dict[str, Any], least: int = 1
    ) -> Completion:
        settings = fitted(self.name, self.model, self.tokenizer, messages, settings, least)
        with self._alone:
            began = time.monotonic()
            write = self._looped if self.is_looped else self._plain
            return write(messages, settings, sampling, began)

    def _looped(self, messages: Messages, settings: ChatSettings, sampling: dict[str, Any], began: float) -> Completion:
        assert self._own is not None
        written = generate(
            self.model,
            self.tokenizer,
            messages,
            exit_config=exit_for(settings.effort, self._own, self.model.num_loops),
            max_new_tokens=settings.max_tokens,
            stop=settings.stop,
            seed=settings.seed,
            verdict=True,
            **sampling,
        )
        return Completion(
            text=truncate_at_stop(written.text, settings.stop),
            usage=Usage(
                calls=1,
                prompt_tokens=written.prompt_tokens,
                completion_tokens=len(written.tokens),
                loop_passes=written.loop_passes,
                seconds=time.monotonic() - began,
            ),
            verdict=written.verdict,
            finish_reason="length" if written.stop_reason == "length" else "stop",
            door=written.door,
        )

    def _plain(self, messages: Messages, settings: ChatSettings, sampling: dict[str, Any], began: float) -> Completion:
        ids = encode(self.tokenizer, messages).to(self.model.device)
        stop = settings.stop
        if stop:
            sampling = {**sampling, "stop_strings": list(stop), "tokenizer": self.tokenizer}
        with torch.random.fork_rng(enabled=settings.seed is not None):
            if settings.seed is not None:
                torch.manual_seed(settings.seed)
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=settings.max_tokens,
                **{"do_sample": False, **sampling},
            )
        new = out[0, ids.shape[1] :]
        text = str(self.tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        ended = int(new[-1]) in eos_ids(self.model.generation_config.eos_token_id)
        stopped = ended or truncate_at_stop(text, stop) != text
        return Completion(
            text=truncate_at_stop(text, stop),
            usage=Usage(1, ids.shape[1], len(new), seconds=time.monotonic() - began),
            finish_reason="stop" if stopped else "length",
        )


class LadderChat:
    """A ladder of models, of which the higher ones write what the lowest cannot settle.

    Args:
        ladder: Rungs, policy, and the budget of each call.
        unit: What goes up. Whole answers are greedy; single tokens need one tokenizer.
        name: In trails; by default the rungs' names.
    """

    def __init__(
        self, ladder: FidelityLadder, unit: Literal["token", "draft", "answer"] = "answer", name: str | None = None
    ) -> None:
        self.ladder = ladder
        self.unit = unit
        self.name = name or ",".join(rung.name for rung in ladder.rungs)
        self._alone = Lock()

    def complete(self, messages: Messages, settings: ChatSettings = DEFAULTS) -> Completion:
        """See `ChatModel`."""
        if settings.grammar is not None:
            raise ValueError(f"{self.name} is a ladder, which cannot be held to a grammar: ask one of its models")
        sampling: dict[str, Any] = {}
        if self.unit == "token":
            sampling = {"do_sample": settings.temperature > 0, "seed": settings.seed}
            if settings.temperature > 0:
                sampling["temperature"] = settings.temperature
        elif settings.temperature > 0:
            raise ValueError(
                f"a ladder of whole {self.unit}s is greedy: temperature {settings.temperature} needs unit='token', "
                "or is 0"
            )
        for rung in self.ladder.rungs:
            if isinstance(rung, LocalRung):
                settings = fitted(rung.name, rung.model, rung.tokenizer, messages, settings)
        with self._alone:
            written = self._at(settings.effort).generate(
                [dict(message) for message in messages],
                self.unit,
                max_new_tokens=settings.max_tokens,
                stop=settings.stop,
                **sampling,
            )
        if not written.text and written.stop_reason == "budget":
            raise ChatFailed(f"the budget of {self.name} allowed no answer: {', '.join(written.not_tried)}")
        costs = written.costs
        outcomes = Counter(decision.outcome for decision in written.trail.decisions)
        return Completion(
            text=truncate_at_stop(written.text, settings.stop),
            usage=Usage(
                calls=1,
                prompt_tokens=sum(cost.read for cost in costs),
                completion_tokens=sum(cost.tokens for cost in costs),
                loop_passes=sum(cost.passes for cost in costs),
                bytes_read=written.bytes_read,
                seconds=written.seconds,
            ),
            verdict=written.verdict,
            finish_reason="length" if written.stop_reason in ("length", "budget") else "stop",
            door=written.door,
            notes={
                "rung": written.rung,
                "top_rung": written.top_rung,
                "outcomes": dict(outcomes),
                "costs": [cost.to_dict() for cost in costs],
            },
        )

    def _at(self, effort: Effort) -> FidelityLadder:
        """The ladder with each rung at an effort."""
        return self.ladder.over([_kept_back(at_effort(rung, effort)) for rung in self.ladder.rungs])


def _kept_back(rung: AnyRung) -> AnyRung:
    """The rung with all loops in place of `verify`, the rule being met at the last.

    A token that may go up cannot be taken back.
    """
    if not isinstance(rung, LocalRung) or rung.exit_config is None or rung.exit_config.after_exit != "verify":
        return rung
    return replace(rung, exit_config=replace(rung.exit_config, after_exit="finish", min_loops=rung.model.num_loops))


class EndpointChat:
    """A server that speaks OpenAI's chat protocol; effort is sent as `reasoning_effort`.

    Args:
        base_url: As the `openai` client takes it.
        model: The server's name for it.
        api_key: By default the variable OPENAI_API_KEY.
        name: In trails; by default the model's.
        timeout: Seconds for one request at most.
        attempts: How often a failed request is sent at most.
        send_effort: Whether `reasoning_effort` is sent; some servers refuse it.

    Raises:
        ValueError: For a bad address, key or limit, or where the `openai` library is missing.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str | None = None,
        name: str | None = None,
        timeout: float = 120.0,
        attempts: int = 3,
        send_effort: bool = True,
    ) -> None:
        with needs_extra("ladder"):
            import openai as openai
        key = api_key or os.environ.get("OPENAI_API_KEY") or "none"
        self.name = name or model
        self.rung = Rung.endpoint(base_url, model, key, name=self.name, timeout=timeout, attempts=attempts)
        self.send_effort = send_effort

    def complete(self, messages: Messages, settings: ChatSettings = DEFAULTS) -> Completion:
        """See `ChatModel`; the verdict is the server's, where it tells one as sigma0's own does."""
        cost = RungCost(self.name)
        client = EndpointClient(self.rung, BudgetTracker(Budget()), cost)
        options: dict[str, Any] = {"temperature": settings.temperature}
        if settings.seed is not None:
            options["seed"] = settings.seed
        if settings.stop:
            options["stop"] = list(settings.stop)
        if self.send_effort:
            options["reasoning_effort"] = settings.effort
        if settings.grammar is not None:
            # as vLLM spells it
            options["extra_body"] = {"structured_outputs": {"grammar": settings.grammar}}
        reply = client.ask(messages, settings.max_tokens, options)
        if reply.text is None:
            raise ChatFailed(f"{self.name} at {self.rung.base_url} gave no answer: {reply.outcome}")
        return Completion(
            text=reply.text,
            usage=Usage(
                calls=1,
                prompt_tokens=cost.read,
                completion_tokens=cost.tokens,
                loop_passes=reply.passes or 0,
                seconds=cost.seconds,
            ),
            verdict=reply.verdict,
            finish_reason="length" if reply.cut else "stop",
            door=reply.door,
            notes={"requests": cost.calls},
        )


class ScriptedChat:
    """Gives scripted replies: for tests, and for trying a strategy without a model.

    Args:
        replies: Texts or completions in order, or a function of the keyword arguments of `complete`, `messages` among
            them. Where they run out, `ChatFailed`.
        name: In trails.

    Attributes:
        calls: The arguments of every call.
    """

    def __init__(
        self, replies: Iterable[str | Completion] | Callable[..., str | Completion], name: str = "scripted"
    ) -> None:
        self.name = name
        self.calls: list[dict[str, Any]] = []
        self._said = replies if callable(replies) else None
        self._replies = iter(()) if callable(replies) else iter(replies)
        self._alone = Lock()

    def complete(self, messages: Messages, settings: ChatSettings = DEFAULTS) -> Completion:
        """See `ChatModel`."""
        call = {
            "messages": [dict(message) for message in messages],
            **asdict(settings),
        }
        with self._alone:
            self.calls.append(call)
            number = len(self.calls)
            scripted = None if self._said is not None else next(self._replies, None)
        # a function is called by several threads at once, as a server would be
        reply = scripted if self._said is None else self._said(**call)
        if reply is None:
            raise ChatFailed(f"{self.name} has no reply to question {number}")
        return reply if isinstance(reply, Completion) else Completion(reply)


def fitted(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    messages: Messages,
    settings: ChatSettings,
    least: int = 1,
) -> ChatSettings:
    """The settings with as many new tokens at most as a model's positions leave after the question.

    How long a question gets is no setting of whoever asked it.

    Raises:
        ChatFailed: Naming the lengths and the limit, where fewer than `least` are left.
        ValueError: For messages that cannot be encoded.
    """
    length = encode(tokenizer, messages).shape[1]
    try:
        check_context(model, length, least)
    except ValueError as error:
        raise ChatFailed(f"{name} cannot hold the question: {error}") from error
    limit = getattr(model.config, "max_position_embeddings", None) or length + settings.max_tokens
    return replace(settings, max_tokens=min(settings.max_tokens, limit - length))


def label_ways(tokenizer: PreTrainedTokenizerFast, labels: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Ids of each label, with and without the space that some models begin an answer with.

    Raises:
        ValueError: For fewer than two labels, or some that a tokenizer cannot write.
    """
    if len(set(labels)) < 2 or any(label.strip() != label or not label for label in labels):
        raise ValueError(f"labels are at least two different words without spaces around them, got {list(labels)!r}")
    ways = []
    for label in labels:
        for text in (label, f" {label}"):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            if tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) == text:
                ways.append(tuple(ids))
        if not ways or not any(tokenizer.decode(way).strip() == label for way in ways):
            raise ValueError(f"this model's tokenizer cannot write the label {label!r}")
    return tuple(ways)
