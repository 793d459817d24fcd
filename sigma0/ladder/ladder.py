"""The ladder itself: rungs, a policy and a budget; texts in, texts out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import PreTrainedTokenizerFast, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria

from sigma0.config import ExitConfig, Messages
from sigma0.ladder.answer_unit import Attempt, Writer, attempt_of
from sigma0.ladder.budget import Budget, BudgetTracker
from sigma0.ladder.reader import Reader
from sigma0.ladder.results import LadderGeneration, LadderStop, LadderToken, ladder_token
from sigma0.ladder.rungs import AnyRung, LocalRung, check_same_tokens
from sigma0.ladder.settling import check_policy, check_settings, final_door, not_tried, versions
from sigma0.ladder.texts import hand_up_whole, write_texts
from sigma0.ladder.token_sampler import samplers_for
from sigma0.ladder.token_unit import Batch, TokenUnit, Written
from sigma0.ladder.trail import Trail, Unit, open_trail
from sigma0.ladder.triggers import (
    AnyOf,
    AnyTrigger,
    Collapse,
    Divergence,
    Doubt,
    Hysteresis,
    Saturation,
    ShutDoor,
    Trigger,
)
from sigma0.models.limits import check_context
from sigma0.models.prompts import encode, with_text
from sigma0.signals.generation import Generation
from sigma0.signals.grounding.check import check
from sigma0.signals.verdict import DoorPolicy, DoorRule, aggregate, door, of_token

# An entropy of 0.51 nats.
TOKEN_CONFIDENCE = 0.6


class FidelityLadder:
    """A cascade of models from cheap to dear: a unit starts on the lowest rung and climbs when the policy fires.

    Args:
        rungs: At least one, the lowest first (`Rung.local`, `Rung.endpoint`).
        budget: Limits of every call; none by default.
        policy: What goes up; by default tokens of too little confidence and collapsing ones (under a certificate those
            that saturate, diverge or collapse), or drafts and answers whose verdict does not open the converge door.
        hysteresis: How long a larger model keeps writing tokens.
        doors: Thresholds of the converge door; by default those of the lowest rung's checkpoint, except that drafts and
            texts of tokens need the confidence of `DoorPolicy`.
        rule: Of that door; by default as `doors` says.

    Raises:
        ValueError: For no rungs, or two of one name.
    """

    def __init__(
        self,
        rungs: Sequence[AnyRung],
        budget: Budget | None = None,
        policy: Trigger | None = None,
        hysteresis: Hysteresis | None = None,
        doors: DoorPolicy | None = None,
        rule: DoorRule | None = None,
    ) -> None:
        self.rungs = tuple(rungs)
        if not self.rungs:
            raise ValueError("a ladder needs at least one rung")
        names = [rung.name for rung in self.rungs]
        if len(set(names)) < len(names):
            raise ValueError(f"each rung needs a name of its own, got {', '.join(names)}")
        self.budget = budget or Budget()
        if policy is not None:
            check_policy(policy)
        self.policy = policy
        self.hysteresis = hysteresis or Hysteresis()
        lowest = self.rungs[0]
        checkpoint_policy = (
            lowest.model.door_policy if isinstance(lowest, LocalRung) and lowest.is_looped else DoorPolicy()
        )
        self._given = doors, rule
        self.doors: DoorPolicy = doors or checkpoint_policy
        if rule is not None:
            self.doors = replace(self.doors, rule=rule)
        # tokens, drafts and texts of several models have no calibrated probability, but the score that needs none
        self.token_doors = self.doors
        if doors is None:
            self.token_doors = replace(self.doors, min_confidence=DoorPolicy().min_confidence)

    def policy_for(self, unit: Unit) -> Trigger:
        """The policy in force for a unit."""
        if self.policy is not None:
            return self.policy
        if unit == "token":
            # a token that is read early has no fate yet, so what a certificate asks of it is that nothing broke
            if self.doors.rule == "certificate":
                return AnyOf((Saturation(), Divergence(), Collapse()))
            return AnyOf((Doubt(TOKEN_CONFIDENCE), Collapse()))
        return ShutDoor(self.doors if unit == "answer" else self.token_doors)

    def over(self, rungs: Sequence[AnyRung], budget: Budget | None = None) -> "FidelityLadder":
        """The same ladder over other rungs, and within another budget if one is given."""
        return FidelityLadder(rungs, budget or self.budget, self.policy, self.hysteresis, *self._given)

    def generate(self, prompt: str | Messages, unit: Unit = "token", **settings: Any) -> LadderGeneration:
        """Continues a prompt.

        Args:
            prompt: A string to be continued, or messages for the chat template.
            unit: What goes up: single tokens (one tokenizer on all rungs), drafts, or whole answers.
            **settings: Of `stream` for tokens; of `sigma0.ladder.texts.write_texts` for drafts and answers.

        Raises:
            ValueError: For bad settings, or rungs that do not fit the unit.
        """
        return self.generate_batch([prompt], unit, **settings)[0]

    def generate_batch(
        self, prompts: Sequence[str | Messages], unit: Unit = "token", **settings: Any
    ) -> list[LadderGeneration]:
        """Continues several prompts; tokens step together, and the budget is one for all.

        Args:
            prompts: At least one.
            unit: What goes up.
            **settings: Of `generate`.
        """
        if isinstance(prompts, str):
            raise ValueError(f"prompts is a list of prompts, got the string {prompts[:40]!r}")
        prompts = [with_text(prompt) for prompt in prompts]
        if unit == "token":
            run = TokenRun(self, prompts, takes_back=True, **settings)
            for _ in run:
                pass
            return run.generations
        if unit not in ("draft", "answer"):
            raise ValueError(f"no such unit: {unit!r}; there are token, draft and answer")
        return write_texts(self, prompts, unit, **settings)

    def take_over(self, prompt: str | Messages, written: Generation | Attempt, **settings: Any) -> LadderGeneration:
        """Continues from an answer that the lowest rung wrote already; its cost is not counted again.

        It goes up if its verdict does not converge, or if the ladder's policy fires.

        Args:
            prompt: The prompt of the answer.
            written: The answer, with its verdict.
            **settings: Of `generate`, for answers.
        """
        by_door = ShutDoor(self.doors)
        policy: Trigger = by_door if self.policy is None else AnyOf((cast(AnyTrigger, self.policy), by_door))
        attempt = attempt_of(written) if isinstance(written, Generation) else written
        return write_texts(self, [with_text(prompt)], "answer", written=attempt, policy=policy, **settings)[0]

    def stream(self, prompt: str | Messages, **settings: Any) -> "TokenRun":
        """Yields the new tokens of one prompt; `generations` of the iterator holds the whole text.

        Args:
            prompt: A string to be continued, or messages for the chat template.
            **settings: `max_new_tokens`, `exit_config` (for every looped rung), `stop`, `sources`, `do_sample`, `seed`,
                `temperature`, `top_k`, `top_p`, `min_p`, `repetition_penalty`; `takes_back`, see `TokenRun`.
        """
        return TokenRun(self, [with_text(prompt)], **settings)


class TokenRun(Iterator[tuple[LadderToken, ...]]):
    """Iterator of the new tokens of a batch, one tuple a step; `generations` holds the texts once it has ended.

    Args:
        ladder: Rungs, policy and budget.
        prompts: At least one.
        max_new_tokens: New tokens of each at most, >= 1.
        exit_config: For every looped rung; by default each checkpoint's.
        stop: Strings that end a text.
        sources: Texts that an answer may be grounded in, beside the prompt.
        takes_back: Whether a text whose verdict does not converge goes up whole, so that `generations` may hold
            another text than the tokens. Not under a policy of the caller's, nor with sampling.
        **choosing: Arguments of `sigma0.ladder.token_sampler.samplers_for`.

    Raises:
        ValueError: For rungs with different tokenizers or no model here, an empty prompt, a text over a model's limit,
            or bad settings.
    """

    def __init__(
        self,
        ladder: FidelityLadder,
        prompts: Sequence[str | Messages],
        *,
        max_new_tokens: int = 64,
        exit_config: ExitConfig | Mapping[str, Any] | None = None,
        stop: Sequence[str] = (),
        sources: Sequence[str] = (),
        takes_back: bool = False,
        **choosing: Any,
    ) -> None:
        rungs = local_rungs(ladder.rungs)
        check_settings(max_new_tokens, stop, sources)
        if not prompts:
            raise ValueError("no prompts")
        config = None if exit_config is None else ExitConfig.parse(exit_config)
        self._ladder, self._rungs = ladder, rungs
        self._tokenizer = rungs[0].tokenizer
        encoded = [encode(self._tokenizer, prompt)[0] for prompt in prompts]
        for rung in rungs:
            check_context(rung.model, max(map(len, encoded)), max_new_tokens)
        self._max_new_tokens = max_new_tokens
        self._criteria = StoppingCriteriaList([StopStringCriteria(self._tokenizer, list(stop))] if stop else [])
        texts = [self._tokenizer.decode(ids, skip_special_tokens=True) for ids in encoded]
        self._contexts = [(text, *sources) for text in texts]
        policy = ladder.policy_for("token")
        self.purse = BudgetTracker(ladder.budget)
        self.trail: Trail = open_trail(
            "token", (rung.to_dict() for rung in rungs), policy, ladder.budget, ladder.hysteresis, versions(),
            ladder.token_doors,
        )  # fmt: skip
        choosers = samplers_for([rung.model for rung in rungs], len(encoded), **choosing)
        greedy = all(chooser.is_greedy for chooser in choosers)
        self._takes_back = takes_back and greedy and ladder.policy is None
        self._prompts = prompts
        self._writer = Writer(rungs, ladder.token_doors, config, stop, self.purse, self.trail, ())
        self._made: list[LadderGeneration] | None = None
        self._unit = TokenUnit(
            [Reader(rung, config, watch=True) for rung in rungs],
            _padded(encoded, self._tokenizer.pad_token_id or 0),
            choosers,
            policy,
            ladder.hysteresis,
            self.purse,
            self.trail,
        )
        self._steps = self._unit.run()
        self._texts = [_Text(self._tokenizer) for _ in encoded]
        self._done = False

    def __next__(self) -> tuple[LadderToken, ...]:
        """The next token of every sequence that has not ended, in the order of the prompts."""
        try:
            written = next(self._steps)
        except StopIteration:
            if not self._done:
                self._done, self._made = True, self._finish()
            raise
        return tuple(self._take(token) for token in written)

    def _take(self, written: Written) -> LadderToken:
        text = self._texts[written.sequence]
        rung = self._rungs[written.rung]
        over: LadderStop | None = None
        ended_by_id = written.token_id in rung.eos
        last = ended_by_id or len(text.tokens) + 1 >= self._max_new_tokens
        piece = text.add(written.token_id, last)
        if ended_by_id:
            over = "eos"
        elif self._stops(written):
            over = "stop"
        elif last:
            over = "length"
        token = LadderToken(
            id=written.token_id,
            text=piece,
            rung=rung.name,
            depth=written.depth,
            reason=written.reason,
            fate=written.fate,
            proximity=written.proximity,
            margin=written.margin,
            entropy=written.entropy,
            handed_up=written.why,
            low_confidence=written.aborted,
        )
        text.tokens.append(token)
        self._unit.readers[written.rung].cost.tokens += 1
        if over is not None:
            text.stop_reason = over
            self._unit.batch.ended[written.sequence] = True
        return token

    def _stops(self, written: Written) -> bool:
        """Whether a stop string ends a text, as in transformers: it may begin in the prompt, or be a special token."""
        if not self._criteria:
            return False
        batch = self._unit.batch
        ids_of_sequence = batch.ids[written.sequence][batch.mask[written.sequence] > 0]
        ids = torch.cat([ids_of_sequence, torch.tensor([written.token_id])])[None]
        return bool(self._criteria(ids, None).any())

    @property
    def generations(self) -> list[LadderGeneration]:
        """The whole texts, in the order of the prompts.

        Raises:
            ValueError: While tokens are still to come.
        """
        if self._made is None:
            raise ValueError("the texts are not finished: read their tokens first")
        return self._made

    def _finish(self) -> list[LadderGeneration]:
        """The texts; with `takes_back`, those that do not converge are handed up whole. Costs are of the batch."""
        made = []
        for number, (text, context) in enumerate(zip(self._texts, self._contexts, strict=True)):
            text.complete(number, self._unit)
            generation = self._generation(text, context)
            if self._takes_back and generation.door == "escalate":
                generation = self._hand_up(number, generation)
            made.append(generation)
        costs = tuple(
            reader.cost.plus(cost) for reader, cost in zip(self._unit.readers, self._writer.costs, strict=True)
        )
        spent, seconds = self.purse.spent, self.purse.seconds
        return [replace(generation, costs=costs, spent=spent, seconds=seconds) for generation in made]

    def _hand_up(self, number: int, below: LadderGeneration) -> LadderGeneration:
        """The result of handing a whole text up."""
        names, writer = [rung.name for rung in self._rungs], self._writer
        entropies = [token.entropy for token in below.tokens if token.entropy is not None]
        attempt = Attempt(
            text=below.text,
            verdict=below.verdict,
            entropy=sum(entropies) / len(entropies) if entropies else None,
            margin=min((token.margin for token in below.tokens if token.margin is not None), default=None),
            stop_reason=below.stop_reason,
        )
        writer.context = self._contexts[number]
        climbed = hand_up_whole(
            writer, self._prompts[number], attempt, names.index(below.rung), self._max_new_tokens, number,
            len(below.tokens),
        )  # fmt: skip
        written = climbed.attempt or attempt
        converges = door(written.verdict, self._ladder.token_doors) == "converge"
        opened = final_door(climbed.aborted, converges, climbed.exhausted)
        left_out = not_tried(self.trail, names) if climbed.aborted else ()
        below = replace(below, door=opened, top_rung=climbed.exhausted, not_tried=left_out)
        if written is attempt:
            return below
        name = names[climbed.rung]
        return replace(
            below,
            text=written.text,
            rung=name,
            tokens=tuple(ladder_token(token, name, "answer") for token in written.tokens),
            verdict=written.verdict,
            grounding=check(written.text, writer.context),
            stop_reason=written.stop_reason,
        )

    def _generation(self, text: "_Text", context: tuple[str, ...]) -> LadderGeneration:
        grounding = check(text.so_far, context)
        # a text of no tokens: the budget did not allow one
        verdicts = [
            of_token(token.reason, token.depth, token.fate, token.proximity, token.entropy) for token in text.tokens
        ]
        verdict = aggregate(verdicts or [of_token(None, 0, None, 0.0)], self._ladder.token_doors, grounding.score)
        top = self._rungs[-1].name
        aborted = text.stop_reason == "budget" or any(token.low_confidence for token in text.tokens)
        reached = any(token.rung == top for token in text.tokens)
        names = [rung.name for rung in self._rungs]
        highest = max((names.index(token.rung) for token in text.tokens), default=0)
        return LadderGeneration(
            text=text.so_far,
            unit="token",
            rung=names[highest],
            tokens=tuple(text.tokens),
            drafts=(),
            verdict=verdict,
            grounding=grounding,
            door=final_door(aborted, door(verdict, self._ladder.token_doors) == "converge", reached),
            top_rung=reached,
            stop_reason=text.stop_reason,
            not_tried=not_tried(self.trail, names) if aborted else (),
            costs=tuple(reader.cost for reader in self._unit.readers),
            spent=self.purse.spent,
            seconds=self.purse.seconds,
            trail=self.trail,
        )


class _Text:
    """A text as it grows."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokens: list[LadderToken] = []
        self.so_far = ""
        self.stop_reason: LadderStop = "budget"
        self._tokenizer = tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []

    def complete(self, sequence: int, unit: TokenUnit) -> None:
        """Gives each token the fate of all its loops, of which some ran after its exit."""
        for number, token in enumerate(self.tokens):
            fate = unit.fate_of(token.rung, sequence, number)
            if fate is not None:
                self.tokens[number] = replace(token, fate=fate)

    def add(self, token_id: int, last: bool) -> str:
        """What a token adds; the last one also what was left of an unfinished character."""
        self._ids.append(token_id)
        piece = self._decoder.step(self._tokenizer.backend_tokenizer, token_id) or ""
        if last:
            whole = self._tokenizer.decode(self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            piece = str(whole)[len(self.so_far) :]
        self.so_far += piece
        return piece


def local_rungs(rungs: Sequence[AnyRung]) -> list[LocalRung]:
    """The rungs, checked for handing up single tokens.

    Raises:
        ValueError: For an endpoint, or different tokenizers.
    """
    local: list[LocalRung] = []
    for rung in rungs:
        if not isinstance(rung, LocalRung):
            raise ValueError(
                f"rung {rung.name!r} is an endpoint, which takes no single tokens: use unit='draft' or unit='answer'"
            )
        if local:
            check_same_tokens(local[-1], rung)
        local.append(rung)
    return local


def _padded(encoded: Sequence[Tensor], pad: int) -> Batch:
    longest = max(map(len, encoded))
    ids = torch.full((len(encoded), longest), pad, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, row_ids in enumerate(encoded):
        ids[row, longest - len(row_ids) :] = row_ids
        mask[row, longest - len(row_ids) :] = 1
    return Batch(ids, mask)
