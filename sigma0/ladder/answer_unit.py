"""Drafts and answers that go up: whole texts, so that rungs need no tokenizer in common.

A rung writes, its text is judged, and where the policy says so the next rung writes instead. A rung that fails or
declines costs itself, never the answer: the best text so far stands.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Protocol

import torch
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria

from sigma0.api import generate as generate_text
from sigma0.config import ExitConfig, Messages
from sigma0.ladder.budget import BudgetTracker, RungCost, Spending
from sigma0.ladder.endpoint import EndpointClient, as_messages
from sigma0.ladder.results import LadderStop
from sigma0.ladder.rungs import AnyRung, EndpointRung, LocalRung
from sigma0.ladder.trail import Decision, Outcome, Spent, Trail
from sigma0.ladder.triggers import Signs, Trigger
from sigma0.models.limits import check_context
from sigma0.models.looped_causal import PROMPT_CHUNK
from sigma0.models.prompts import encode
from sigma0.signals.canary import CollapseCanary
from sigma0.signals.generation import Generation
from sigma0.signals.grounding.check import check
from sigma0.signals.tokens import Token
from sigma0.signals.verdict import DoorPolicy, ReasonVerdict, aggregate, of_token

WARM_START = "A first draft of the answer, which may be wrong, is:\n\n{draft}\n\nGive the right answer."


@dataclass(frozen=True)
class Attempt:
    """A text that a rung wrote."""

    text: str  # As it is
    verdict: ReasonVerdict  # On it
    entropy: float | None  # Mean over its tokens, nats; None where unknown
    margin: float | None  # Least of its tokens; None where unknown
    stop_reason: LadderStop  # Why it ends
    sure: str = ""  # What of the text comes before its least sure token, for a warm start; "" where that is not known
    tokens: tuple[Token, ...] = ()  # Of the text, where a looped model wrote it; else empty


@dataclass
class Climb:
    """Result of one unit."""

    attempt: Attempt | None = None  # The final text; None if no rung gave any
    rung: int = 0  # Index of the rung that wrote it
    aborted: bool = False  # Whether the budget kept it from going up further
    exhausted: bool = False  # Whether the highest rung was tried


def attempt_of(generation: Generation) -> Attempt:
    """The attempt of a looped model, with its verdict.

    Raises:
        ValueError: Without a verdict.
    """
    if generation.verdict is None:
        raise ValueError("no verdict was asked for: pass verdict=True")
    attempt = attempt_from(generation.text, generation.tokens, generation.verdict, generation.stop_reason)
    return replace(attempt, tokens=generation.tokens)


class Read(Protocol):
    """A token with statistics of its logits.

    Attributes:
        text: What it adds to the text.
        entropy: Of the distribution, nats; None if unknown.
        margin: Top-1 probability minus top-2; None if unknown.
    """

    @property
    def text(self) -> str: ...  # noqa: D102
    @property
    def entropy(self) -> float | None: ...  # noqa: D102
    @property
    def margin(self) -> float | None: ...  # noqa: D102


def attempt_from(text: str, tokens: Sequence[Read], verdict: ReasonVerdict, stop_reason: LadderStop) -> Attempt:
    """An attempt out of the tokens of a text: its mean entropy, its least margin, and what stands before that.

    Args:
        text: As a whole.
        tokens: At least one.
        verdict: On the text.
        stop_reason: Why it ends.
    """
    entropies = [token.entropy for token in tokens if token.entropy is not None]
    margins = [token.margin for token in tokens]
    least = min(range(len(margins)), key=lambda place: margins[place] or 0.0)
    return Attempt(
        text=text,
        verdict=verdict,
        entropy=sum(entropies) / len(entropies) if entropies else None,
        margin=margins[least],
        stop_reason=stop_reason,
        sure="".join(token.text for token in tokens[:least]),
    )


@dataclass(frozen=True)
class Given:
    """Input of a rung."""

    prompt: str | Messages  # To continue, or to answer
    kept: str  # The part of its text that is there already
    new: int  # New tokens at most


class Writer:
    """Writes whole texts at any rung, and pays for them.

    Args:
        rungs: The lowest first.
        doors: Shares and thresholds for verdicts.
        exit_config: For every looped rung; None: as each checkpoint says.
        stop: Strings that end a text.
        purse: What may be spent.
        trail: Takes what was spent.
        context: What a text is to be grounded in.
    """

    def __init__(
        self,
        rungs: Sequence[AnyRung],
        doors: DoorPolicy,
        exit_config: ExitConfig | Mapping[str, Any] | None,
        stop: Sequence[str],
        purse: BudgetTracker,
        trail: Trail,
        context: tuple[str, ...],
    ) -> None:
        self.rungs, self.doors, self.purse, self.trail, self.context = rungs, doors, purse, trail, context
        self.costs = [RungCost(rung.name) if isinstance(rung, EndpointRung) else rung.new_cost() for rung in rungs]
        self._exit_config = exit_config
        self._stop = tuple(stop)
        self._clients: dict[int, EndpointClient] = {}

    def forecast(self, rung: int, prompt: str | Messages, max_new_tokens: int) -> Spending:
        """The most that a text of a local rung costs; of an endpoint, one attempt."""
        here = self.rungs[rung]
        if isinstance(here, EndpointRung):
            return self._client(rung, here).most(as_messages(prompt), max_new_tokens)
        try:
            read = len(encode(here.tokenizer, prompt)[0])
        except ValueError:
            if rung == 0:
                raise
            return Spending()  # the prompt does not even fit, which `write` reports
        loops = here.model.num_loops if here.is_looped else 1
        chunks = -(-read // PROMPT_CHUNK) if here.is_looped else 1
        passes = loops * (chunks + max_new_tokens)
        above = rung > 0
        return Spending(
            loop_passes=passes,
            large_tokens=max_new_tokens if above else 0,
            catch_up_tokens=read if above else 0,
        )

    def write(self, rung: int, prompt: str | Messages, max_new_tokens: int) -> tuple[Attempt | None, str]:
        """A text, or None and the kind of failure; paid for either way."""
        here = self.rungs[rung]
        if isinstance(here, EndpointRung):
            return self._ask(rung, here, prompt, max_new_tokens)
        began = perf_counter()
        write = self._write_looped if here.is_looped else self._write_plain
        try:
            attempt, cost = write(rung, here, prompt, max_new_tokens)
        except (ValueError, torch.OutOfMemoryError) as error:
            if rung == 0:
                raise
            # a rung that cannot take the prompt costs itself, never the answer
            return None, f"refused: {type(error).__name__}"
        spending = self.forecast(rung, prompt, max_new_tokens)
        assert cost.loop_passes <= spending.loop_passes and cost.catch_up_tokens <= spending.catch_up_tokens
        seconds = perf_counter() - began
        self.costs[rung].seconds += seconds
        self._pay(rung, cost, f"write {rung}", seconds, "ok")
        return attempt, "ok"

    def _write_looped(
        self, rung: int, here: LocalRung, prompt: str | Messages, max_new_tokens: int
    ) -> tuple[Attempt, Spending]:
        generation = generate_text(
            here.model, here.tokenizer, prompt, exit_config=self._exit_config or here.exit_config,
            max_new_tokens=max_new_tokens, stop=self._stop, verdict=True, sources=self.context,
            policy=self.doors, do_sample=False,
        )  # fmt: skip
        loops = generation.prompt_rows // max(1, generation.prompt_tokens)
        chunks = -(-generation.prompt_tokens // PROMPT_CHUNK)
        prompt_passes, readings = loops * chunks, min(generation.loop_passes, generation.head_rows)
        cost = self.costs[rung]
        cost.beside_bytes += here.beside_bytes(chunks + len(generation.tokens) - 1, chunks + readings)
        cost.passes += generation.loop_passes
        cost.prompt_passes += prompt_passes
        cost.rows += generation.loop_rows + generation.prompt_rows
        cost.read += generation.prompt_tokens
        cost.tokens += len(generation.tokens)
        return attempt_of(generation), self._spending(
            rung, generation.loop_passes + prompt_passes, len(generation.tokens), generation.prompt_tokens
        )

    def _write_plain(
        self, rung: int, here: LocalRung, prompt: str | Messages, max_new_tokens: int
    ) -> tuple[Attempt, Spending]:
        ids = encode(here.tokenizer, prompt).to(here.model.device)
        read = ids.shape[1]
        check_context(here.model, read, max_new_tokens)
        criteria = StoppingCriteriaList([StopStringCriteria(here.tokenizer, list(self._stop))] if self._stop else [])
        with torch.no_grad():
            out = here.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False,
                num_beams=1, num_return_sequences=1, stopping_criteria=criteria, return_dict_in_generate=True,
                output_logits=True,
            )  # fmt: skip
        new = out.sequences[0, read:]
        text = here.tokenizer.decode(new, skip_special_tokens=True)
        cost = self.costs[rung]
        cost.prompt_passes += 1
        cost.passes += len(new) - 1
        cost.rows += read + len(new) - 1
        cost.read += read
        cost.tokens += len(new)
        attempt = self._judged_plain(text, new, torch.cat(out.logits), here, int(new[-1]) in here.eos, max_new_tokens)
        return attempt, self._spending(rung, len(new), len(new), read)

    def _judged_plain(
        self, text: str, new: torch.Tensor, logits: torch.Tensor, here: LocalRung, ended: bool, max_new_tokens: int
    ) -> Attempt:
        """The signs of a model without loops: what its logits and its text say."""
        chances = torch.softmax(logits.float(), dim=-1)  # [n, V]
        best = chances.topk(2, dim=-1).values
        margins = (best[:, 0] - best[:, 1]).tolist()
        canary = CollapseCanary(1, device=logits.device)
        proximity = max(
            float(canary.observe(row[None], chosen[None]).proximity) for row, chosen in zip(logits, new, strict=True)
        )
        least = min(range(len(margins)), key=margins.__getitem__)
        entropy = _number(float(torch.special.entr(chances).sum(-1).mean()))
        stopped = any(string in text for string in self._stop)
        stop_reason: LadderStop = "eos" if ended else "stop" if stopped else "length"
        return Attempt(
            text=text,
            verdict=self._verdict(text, proximity, entropy),
            entropy=entropy,
            margin=_number(margins[least]),
            stop_reason=stop_reason,
            sure=here.tokenizer.decode(new[:least], skip_special_tokens=True),
        )

    def _verdict(self, text: str, proximity: float, entropy: float | None = None) -> ReasonVerdict:
        score = check(text, self.context).score
        return aggregate([of_token(None, 0, None, proximity, entropy)], self.doors, score)

    def _ask(
        self, rung: int, here: EndpointRung, prompt: str | Messages, max_new_tokens: int
    ) -> tuple[Attempt | None, str]:
        client = self._client(rung, here)
        reply = client.ask(as_messages(prompt), max_new_tokens)
        for cost, seconds, outcome in client.spent:
            self.trail.lines.append(Spent(rung, f"ask {here.name}", cost, seconds, outcome))
        client.spent.clear()
        if reply.text is None:
            return None, reply.outcome if reply.lacking is None else f"{reply.outcome}, then no {reply.lacking} left"
        text = reply.text
        cut = min((place for place in (text.find(string) for string in self._stop) if place >= 0), default=None)
        text = text if cut is None else text[:cut]
        stop_reason: LadderStop = "stop" if cut is not None else "length" if reply.cut else "eos"
        return Attempt(text, self._verdict(text, 0.0), None, None, stop_reason), "ok"

    def _client(self, rung: int, here: EndpointRung) -> EndpointClient:
        if rung not in self._clients:
            self._clients[rung] = EndpointClient(here, self.purse, self.costs[rung])
        return self._clients[rung]

    def given(self, rung: int, prompt: str | Messages, new: int, draft: Attempt | None) -> Given:
        """What a rung is given: the prompt, and for a warm start a draft as far as it fits.

        Args:
            rung: That is to write.
            prompt: What was asked.
            new: New tokens at most, those of the draft that are kept counted in.
            draft: For a warm start; None for a cold one.
        """
        here, cold = self.rungs[rung], Given(prompt, "", new)
        if draft is None:
            return cold
        if isinstance(here, LocalRung) and isinstance(prompt, str):
            kept = len(here.tokenizer(draft.sure, add_special_tokens=False)["input_ids"])
            warm = Given(prompt + draft.sure, draft.sure, new - kept)
        else:
            # an endpoint answers messages, it does not continue half a sentence
            question = {"role": "user", "content": WARM_START.format(draft=draft.text)}
            warm = Given([*as_messages(prompt), question], "", new)
        return warm if warm.new > 0 and self._fits(here, warm) else cold

    def _fits(self, here: AnyRung, given: Given) -> bool:
        if isinstance(here, EndpointRung):
            return True
        limit = getattr(here.model.config, "max_position_embeddings", None)
        return limit is None or len(encode(here.tokenizer, given.prompt)[0]) + given.new <= limit

    def after(self, attempt: Attempt, kept: str) -> Attempt:
        """A text with what was there before it; looked up as a whole."""
        text = kept + attempt.text
        parts = [attempt.verdict.model_copy(update={"grounded": None})]
        verdict = aggregate(parts, self.doors, check(text, self.context).score)
        return replace(attempt, text=text, verdict=verdict, sure=kept + attempt.sure)

    def _spending(self, rung: int, passes: int, tokens: int, read: int) -> Spending:
        above = rung > 0
        return Spending(loop_passes=passes, large_tokens=tokens if above else 0, catch_up_tokens=read if above else 0)

    def _pay(self, rung: int, cost: Spending, step: str, seconds: float, outcome: str) -> None:
        self.purse.pay(cost, step, seconds)
        self.trail.lines.append(Spent(rung, step, cost, seconds, outcome))


def climb(
    writer: Writer,
    policy: Trigger,
    prompt: str | Messages,
    max_new_tokens: int,
    sequence: int = 0,
    position: int = 0,
    warm_start: bool = False,
    written: Attempt | None = None,
    start: int = 0,
    whole: bool = False,
    is_draft: bool = False,
) -> Climb:
    """One unit, from the lowest rung up.

    Args:
        writer: Writes and pays.
        policy: What goes up.
        prompt: What the unit continues.
        max_new_tokens: Of the unit at most.
        sequence: Number of the prompt.
        position: Number of the unit in its text.
        warm_start: Whether a higher rung is given what the lower one wrote: of a string what comes before the least
            sure token, to go on from; in messages the whole draft, as one that may be wrong.
        written: What the rung `start` wrote already; None lets it write.
        start: The lowest rung that has a say.
        whole: Whether it is a whole text of single tokens or drafts, for the trail.
        is_draft: Whether it is a piece of an answer: a calibrated confidence is of whole answers to a question.
    """
    result, top = Climb(), len(writer.rungs) - 1
    # what is there already costs nothing more, and stands even where nothing is left
    if written is None:
        spending = writer.forecast(start, prompt, max_new_tokens)
        if writer.purse.lacks(spending, f"write {start}") is not None:
            return Climb(aborted=True)
    rung, given = start, Given(prompt, "", max_new_tokens)
    while True:
        ready = written is not None and rung == start
        attempt, status = (written, "ok") if ready else writer.write(rung, given.prompt, given.new)
        result.aborted = result.aborted or "left" in status.split()
        if attempt is not None and given.kept:
            attempt = writer.after(attempt, given.kept)
        if attempt is not None and attempt.tokens and is_draft:
            parts, verdict = [token.verdict for token in attempt.tokens], attempt.verdict
            scored = aggregate(parts, writer.doors, verdict.grounded)
            # only the first one continues the question itself, which may be out of calibration
            reason = verdict.reason if position == 0 else scored.reason
            attempt = replace(attempt, verdict=scored.model_copy(update={"reason": reason}))
        signs = None if attempt is None else Signs(sequence, position, attempt.verdict, attempt.entropy, attempt.margin)
        outcome, why = _judged(writer, policy, attempt, signs, rung, status)
        # what a rung declined stands only where no rung gives more
        if attempt is not None and (outcome != "decline" or result.attempt is None):
            result.attempt, result.rung = attempt, rung
        shown = None if signs is None else signs.to_dict()
        if outcome in ("accept", "top_rung") or (rung == top and outcome in ("decline", "error")):
            writer.trail.lines.append(Decision(sequence, position, rung, shown, why, outcome, whole=whole))
            result.exhausted = rung == top
            return result
        given = writer.given(rung + 1, prompt, max_new_tokens, result.attempt if warm_start else None)
        spending = writer.forecast(rung + 1, given.prompt, given.new)
        lacking = writer.purse.lacks(spending, f"write {rung + 1}")
        if outcome == "hand_up" and lacking is not None:
            outcome = "abort"
        decision = Decision(sequence, position, rung, shown, why, outcome, spending, lacking, whole=whole)
        writer.trail.lines.append(decision)
        if lacking is not None:
            result.aborted = True
            return result
        rung += 1


def _judged(
    writer: Writer, policy: Trigger, attempt: Attempt | None, signs: Signs | None, rung: int, status: str
) -> tuple[Outcome, str | None]:
    """What becomes of a text while the budget has no say, and why."""
    if attempt is None or signs is None:
        return "error", status
    # a later draft may be nothing but the end of the text
    only_ends = signs.position > 0 and attempt.stop_reason == "eos" and not attempt.text.strip()
    if not only_ends and writer.rungs[rung].declines(attempt.text):
        return "decline", "no answer"
    why = policy.fires(signs)
    if why is None:
        return "accept", None
    return "top_rung" if rung == len(writer.rungs) - 1 else "hand_up", why


def _number(value: float) -> float | None:
    """None where logits were no numbers."""
    return value if math.isfinite(value) else None
