"""A request on its way: what it has written, how it chooses, and what it needs to be begun anew elsewhere."""

from collections import deque
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import EosTokenCriteria, GenerationConfig, MaxLengthCriteria, StoppingCriteriaList

from sigma0.decode.batch import Ints
from sigma0.decode.detokenizer import TextFeed
from sigma0.decode.exits import ExitRule
from sigma0.decode.ops import Operations
from sigma0.decode.paged_step import Ruled
from sigma0.decode.repetition import CollapseStop, EntropyDrop, Repetition
from sigma0.decode.rows import LEADER, PASSIVE
from sigma0.decode.sampler import generator_for, processors_for
from sigma0.decode.step import Exits, Readings
from sigma0.decode.token_loop import Emission
from sigma0.decode.verify import VerifiedLoop
from sigma0.serve.engine.messages import Job, TokenTold
from sigma0.serve.engine.scheduler import Entry
from sigma0.signals.canary import Tighten


@dataclass(frozen=True)
class Halted:
    """A row that waits where it is until everything before it has been read anew.

    Attributes:
        loops: It had finished.
        role: As `sigma0.decode.rows` has it.
    """

    loops: int
    role: int


class Running:
    """A request and all that belongs to it.

    Args:
        entry: What the scheduler knows of it.
        job: What was asked.
        rule: When tokens stop.
        feed: Of its text.
        eos: Ids that end it.
        model: The looped model.
        watch: Whether fates are wanted.

    Attributes:
        told: Tokens so far.
        cached: Columns of the prompt that were found in the prefix cache.
        unasked: The rule that would have stopped its tokens, where `full` or `fixed` does.
        ruled: How its rows are decided.
        ids: Of every column that has entered or is about to, proposals among them.
        waiting: Columns that enter the next pass.
        depths: Loop behind which each new token's row was dropped, by column; only under `drop`.
        halted: Rows in flight when it was put back, by column; empty once they go on.
        anew: Columns that are only read, since what they say was told before it was put back.
        passes: Passes with a row of a new token.
        rows: Rows of new tokens.
        saved: What the collapse statistics remember of it while it is not running.
        fates: Of its columns' loops, likewise.
        met: Whether its columns met a boundary's rule, likewise.
        repetition: Of the ids that were told.
        drop: Of the entropy at them.
        collapsed: Whether it was ended because it runs in circles.
    """

    def __init__(
        self, entry: Entry, job: Job, rule: ExitRule, feed: TextFeed, eos: frozenset[int], model: Any, watch: bool
    ) -> None:
        self.entry = entry
        self.job = job
        self.rule = rule
        self.feed = feed
        self.prompt = len(job.prompt_ids)
        self.drops = job.exit_config.after_exit == "drop"
        self.unasked: ExitRule | None = model.unasked_rule(job.exit_config) if watch else None
        asked = rule if self.unasked is None else self.unasked
        self.ruled = Ruled(rule, asked.boundary(watch), job.exit_config.after_exit == "verify", self.prompt)
        self.told: list[TokenTold] = []
        self.ids = entry.ids
        self.waiting: deque[int] = deque()
        self.depths: dict[int, int] = {}
        self.halted: dict[int, Halted] = {}
        self.anew = 0
        self.passes = 0
        self.rows = 0
        self.cached = 0
        self.saved: tuple[Tensor, ...] | None = None
        self.fates: npt.NDArray[np.int8] | None = None
        self.met: npt.NDArray[np.bool_] | None = None
        self._eos = eos
        self._model = model
        self._device = model.device
        self._processors = processors_for(job.sampling, self.prompt)
        if job.on_collapse == "tighten":
            self._processors.append(Tighten(self.prompt))
        self._collapse = CollapseStop() if job.on_collapse == "stop" else None
        self.repetition = Repetition()
        self.drop = EntropyDrop()
        self.collapsed = False
        self._generator = generator_for(job.sampling, model.device)

    @property
    def is_plain(self) -> bool:
        """Whether the likeliest id is the choice."""
        return not self._processors and self._generator is None

    @property
    def is_replaying(self) -> bool:
        """Whether rows that were in flight still have to get to where they were."""
        return bool(self.halted)

    def target(self, column: int) -> int:
        """Loop behind which the row of a column leaves, or is held."""
        halted = self.halted.get(column)
        return halted.loops if halted is not None else self.depths.get(column, self.rule.last_loop)

    def reads_again(self, column: int, loops: int) -> bool:
        """Whether a token that was read before is read again at a loop."""
        return False

    def role(self, column: int) -> int:
        """What the row of a column is as it enters."""
        return PASSIVE if self.is_replaying or column < max(self.prompt - 1, self.anew) else LEADER

    def choose(self, logits: Tensor) -> int:
        """The next id, given logits `[V]`, where the likeliest is not simply taken."""
        ids = torch.tensor([self.ids], device=self._device)
        scores = self._processors(ids, logits.to(torch.float32, copy=True)[None])
        if self._generator is None:
            return int(scores.argmax(-1))
        return int(torch.multinomial(torch.softmax(scores, dim=-1)[0], 1, generator=self._generator))

    def is_last(self, token_id: int) -> bool:
        """Whether the text ends with an id that is about to be told."""
        return token_id in self._eos or len(self.told) + 1 >= self.job.max_new_tokens

    def collapses(self) -> bool:
        """Whether the text ends with the id that is being told because it runs in circles."""
        self.collapsed = self._collapse is not None and self._collapse.ends(self.repetition)
        return self.collapsed

    def ends_text(self, token_id: int) -> bool:
        """Whether an id is an end."""
        return token_id in self._eos

    def append(self, token_id: int) -> None:
        """A told token that is to be fed back."""
        self.waiting.append(len(self.ids))
        self.ids.append(token_id)

    def halt(self, columns: Ints, loops: Ints, roles: Ints) -> None:
        """Remembers its rows in flight, and what is to be read anew before they can go on."""
        flight = zip(columns.tolist(), loops.tolist(), roles.tolist(), strict=True)
        # one that is put back while it reads anew still has the older rows to get to
        found = {column: Halted(loop, role) for column, loop, role in flight if role != PASSIVE}
        self.halted = {**found, **self.halted}
        entered = len(self.ids) - len(self.waiting)
        self.anew = entered if self.told and not self.halted else 0
        self.entry.goal = entered
        exact = self.prompt if self.drops else entered
        self.entry.reusable = min(exact if self.told else self.prompt - 1, entered, *self.halted)

    def resume(self) -> dict[int, Halted]:
        """The rows that go on from where they were, once all of them have got there."""
        halted, self.halted = self.halted, {}
        return halted


class _Place:
    """What `VerifiedLoop` knows of a wave: its text goes in and out of the engine's rows."""

    def __init__(self, running: "Verified", rule: ExitRule, ops: Operations) -> None:
        self._running = running
        self.rule = rule
        self.ops = ops
        self.record = None
        self.cache = SimpleNamespace(length=running.prompt)

    def enter(self, token_ids: Tensor, sequences: Ints, columns: Ints, positions: Ints) -> None:
        """A proposed or checked token is fed back."""
        assert int(columns[0]) == len(self._running.ids)
        self._running.append(int(token_ids[0]))

    def drop_from(self, sequence: int, column: int) -> None:
        """Tokens were taken back."""
        self._running.take_back(column)


class Verified(Running):
    """A request whose tokens are proposed early and told once loop T agrees.

    Args:
        *args: As `Running` takes them.

    Attributes:
        dropped: First column that was taken back since the engine looked; None where none was.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.dropped: int | None = None
        self._first_met: bool | None = None
        config = GenerationConfig(
            do_sample=self._generator is not None, max_length=self.prompt + self.job.max_new_tokens
        )
        config._pad_token_tensor = None
        criteria = StoppingCriteriaList([MaxLengthCriteria(self.prompt + self.job.max_new_tokens)])
        if self._eos:
            criteria.append(EosTokenCriteria(sorted(self._eos)))
        self.loop = VerifiedLoop(
            _Place(self, self.rule, self._model.operations),
            torch.tensor([self.job.prompt_ids], device=self._device),
            np.array([self.prompt]),
            self._processors,
            criteria,
            config,
        )
        if self._generator is not None:
            self.loop.generators = [self._generator]

    def reads_again(self, column: int, loops: int) -> bool:
        """At loop T; at every loop, where tokens may be redrafted."""
        return column >= self.prompt and (self.job.exit_config.redraft or loops == self.rule.total_loops)

    def target(self, column: int) -> int:
        """Every row runs to loop T."""
        halted = self.halted.get(column)
        return self.rule.total_loops if halted is None else halted.loops

    def take_back(self, column: int) -> None:
        """Forgets the ids from a column on; the engine drops their rows."""
        del self.ids[column:]
        self.waiting = deque(each for each in self.waiting if each < column)
        self.dropped = column if self.dropped is None else min(self.dropped, column)

    def judge_first(self, met: bool, diverged: bool) -> None:
        """Notes how the rule stands after a loop of the position that the first token is read from.

        That token is read at loop T whatever comes of it; where it would have stopped first is what counts, as of any
        other token. Loops that are run again after a preemption say the same again.

        Args:
            met: Whether the rule is met there.
            diverged: Whether the loop would have stopped it there unmet.
        """
        if self._first_met is None and (met or diverged):
            self._first_met = met

    def take(self, exits: Exits | None, readings: Readings | None) -> list[tuple[Emission, Tensor]]:
        """What one pass settled."""
        if not self.told and exits is not None:
            return self.loop.begin(replace(exits, met=np.array([bool(self._first_met)])))
        return self.loop.take(exits, readings)
