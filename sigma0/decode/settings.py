"""Settings of every sequence as tensors, so that one pass serves any mixture of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sigma0.decode.exits import ExitRule
from sigma0.decode.ops import MODES, RuleRows

# Columns of the table of settings.
(
    LAST,
    MIN_LOOPS,
    DROPS_AT_EXIT,
    VERIFY,
    REDRAFT,
    LIMIT,
    PROMPT,
    MODE,
    PATIENCE,
    BREAK_AFTER,
    CRITERION,
    SETTINGS_WIDTH,
) = range(12)
# Columns of the thresholds.
OWN, Q, THETA, THRESHOLDS = range(4)
_NO_EOS = -1
# Above every cache position.
NO_LIMIT = 2**62


@dataclass(frozen=True)
class Program:
    """What a pass has to compute: the union over the sequences in it. Everything else costs nothing."""

    gate: bool = False  # Some sequence stops by `qexit`
    modes: frozenset[str] = frozenset()  # Rules over differences in use, as `ExitParams` names them; empty for none
    watch: bool = False  # Differences are kept: for such a rule, or the inner break
    breaks: bool = False  # Some token stops where its loop diverges
    margin: bool = False  # Some sequence stops by `margin`
    reads_logits: bool = False  # Some sequence's rule reads the head at every loop, so all tokens that decode are read
    verify: bool = False  # Some sequence checks its drafts
    mixed: bool = False  # Some sequence does not check its drafts, though another one does
    redrafts: bool = False  # Some sequence checks its drafts at every loop
    leaves: bool = False  # Some token leaves before loop T: under `drop`, or under `fixed`
    drops: bool = False  # Some token runs no loop after its exit
    prompts: bool = False  # Some sequence's last prompt token runs in a lane
    forced: bool = False  # Exits are given beforehand
    paths: bool = False  # The states after every loop are kept, for statistics
    draws: bool = False  # Some sequence draws its tokens
    criteria: frozenset[str] = frozenset()  # Those of `sigma0.decode.exits` in use
    masked: bool = False  # Some sequence follows a grammar

    @property
    def known(self) -> bool:
        """Whether every exit is known without looking at a state."""
        return not (self.gate or self.modes or self.reads_logits or self.criteria or self.breaks or self.forced)


@dataclass(frozen=True)
class SequenceExit:
    """When the tokens of one sequence stop, and what follows."""

    rule: ExitRule  # The exit rule
    drop: bool = False  # Tokens leave at their exits
    verify: bool = False  # Drafts are checked at loop T
    prompt: int = 0  # Cache positions below it are a prompt's: they run every loop, and under `verify` are read at T
    prompt_in_lanes: bool = False  # Whether the last of them runs in a lane


class SequenceSettings:
    """Settings of S sequences.

    Args:
        sequences: S.
        depth: T.
        device: Where the lanes are.

    Attributes:
        table: LAST (loop that no token goes beyond before it is read), MIN_LOOPS, DROPS_AT_EXIT (whether it leaves
            there), VERIFY, REDRAFT, LIMIT (cache position of the last token that may be written), PROMPT, MODE,
            PATIENCE, BREAK_AFTER and CRITERION (index into `sigma0.decode.exits.CRITERIA`, -1 for none), int64
            `[S, 11]`.
        thresholds: q, eps or theta of each rule, and once more q and theta, infinite under another rule, float32
            `[S, 3]`.
        eos: Ids that end a sequence, -1 where there are fewer, int64 `[S, E]`.
        growth: m of the fate `diverge`.
        spiral: theta of the fate `spiral`, in radians.
        exits: Given exits of the token at each cache position after PROMPT, in a ring, int64 `[S, n]`; None for none.
        settled: With given exits, the loop from which on a draft is accepted, as `exits`; None to judge it.
    """

    def __init__(self, sequences: int, depth: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.table = torch.zeros((sequences, SETTINGS_WIDTH), dtype=torch.int64, device=device)
            self.table[:, LIMIT] = NO_LIMIT
            self.thresholds = torch.full((sequences, THRESHOLDS), math.inf, dtype=torch.float32, device=device)
            self.eos = torch.full((sequences, 1), _NO_EOS, dtype=torch.int64, device=device)
        self.depth = depth
        self.growth, self.spiral = 0.1, 1.0
        self.exits: Tensor | None = None
        self.settled: Tensor | None = None
        # kept, since steps that were captured read them where they are
        self._held_exits: Tensor | None = None
        self._held_settled: Tensor | None = None
        self._exits: list[SequenceExit | None] = [None] * sequences

    def reset(self) -> None:
        """Forgets all sequences; every one of them is then set anew."""
        self._exits = [None] * len(self._exits)
        self.exits = self.settled = None

    def _in_place(self, wanted: Tensor, known: Tensor | None) -> Tensor:
        if known is None or known.shape != wanted.shape:
            return wanted.to(self.table.device)
        return known.copy_(wanted)

    def set_exit(self, sequences: Sequence[int], wanted: SequenceExit) -> None:
        """Sets when the tokens of some sequences stop."""
        rule = wanted.rule
        params = rule.params(watch=False)
        mode = params.decides_by
        leaves = wanted.drop or (not wanted.verify and rule.last_loop < self.depth)
        values = [
            rule.last_loop,
            rule.min_loops,
            leaves,
            wanted.verify,
            rule.config.redraft,
            NO_LIMIT,
            wanted.prompt,
            MODES.index(mode),
            params.patience,
            params.break_after,
            -1 if rule.criterion is None else rule.criterion,
        ]
        rows = slice(sequences[0], sequences[-1] + 1)
        limits = self.table[rows, LIMIT].clone()
        self.table[rows] = torch.tensor(values, device=self.table.device)
        self.table[rows, LIMIT] = limits
        q = rule.threshold if mode == "qexit" else math.inf
        theta = rule.threshold if rule.config.mode == "margin" else math.inf
        self.thresholds[rows] = torch.tensor([rule.threshold, q, theta], device=self.table.device)
        self.growth, self.spiral = params.growth, params.spiral
        if rule.script is not None:
            exits, settled = rule.script.tensors(len(self._exits))
            self.exits = self._held_exits = self._in_place(exits, self._held_exits)
            self.settled = None
            if settled is not None:
                self.settled = self._held_settled = self._in_place(settled, self._held_settled)
        for sequence in sequences:
            self._exits[sequence] = wanted

    def set_ends(self, sequences: Sequence[int], eos: Sequence[int], limit: int | None) -> None:
        """Sets the ids that end some sequences, and the cache position of their last token."""
        missing = len(eos) - self.eos.shape[1]
        if missing > 0:
            self.eos = torch.nn.functional.pad(self.eos, (0, missing), value=_NO_EOS)
        rows = slice(sequences[0], sequences[-1] + 1)
        self.eos[rows] = _NO_EOS
        self.eos[rows, : len(eos)] = torch.tensor(list(eos), dtype=torch.int64, device=self.eos.device)
        self.table[rows, LIMIT] = NO_LIMIT if limit is None else limit

    def clear(self, sequence: int) -> None:
        """Forgets a sequence, and given exits with the last one."""
        self._exits[sequence] = None
        if not any(self._exits):
            self.exits = self.settled = None

    def program(self, paths: bool = False, draws: bool = False, masked: bool = False) -> Program:
        """What a pass over the sequences that are set has to compute, beside what `Program` has of these names."""
        wanted = [item for item in self._exits if item is not None]
        params = [item.rule.params(watch=False) for item in wanted]
        modes = frozenset(item.decides_by for item in params) - {"none"}
        breaks = any(item.break_after for item in params)
        return Program(
            gate="qexit" in modes,
            modes=modes - {"qexit"},
            watch=breaks or bool(modes - {"qexit"}),
            breaks=breaks,
            margin=any(item.rule.config.mode == "margin" for item in wanted),
            reads_logits=any(item.rule.needs_logits for item in wanted),
            criteria=frozenset(item.rule.config.mode for item in wanted if item.rule.criterion is not None),
            verify=any(item.verify for item in wanted),
            mixed=len({item.verify for item in wanted}) > 1,
            redrafts=any(item.verify and item.rule.config.redraft for item in wanted),
            leaves=any(item.drop or (not item.verify and item.rule.last_loop < self.depth) for item in wanted),
            drops=any(item.drop for item in wanted),
            prompts=any(item.prompt_in_lanes for item in wanted),
            forced=self.exits is not None,
            paths=paths,
            draws=draws,
            masked=masked,
        )

    def rows(self, program: Program, sequences: Tensor) -> RuleRows:
        """Parameters of the loop end for rows of these sequences, int64 `[R]`."""
        current = self.thresholds[:, OWN].index_select(0, sequences)
        return self.rules(program, self.table.index_select(0, sequences), current)

    def rules(self, program: Program, table: Tensor, thresholds: Tensor) -> RuleRows:
        """The same of rows whose settings are `[R, 11]`, and whose rules' thresholds `[R]`."""
        return RuleRows(
            modes=program.modes | ({"qexit"} if program.gate else frozenset()),
            mode=table[:, MODE],
            threshold=thresholds,
            last_loop=table[:, LAST],
            patience=table[:, PATIENCE],
            min_loops=table[:, MIN_LOOPS],
            break_after=table[:, BREAK_AFTER],
            watch=program.watch,
            growth=self.growth,
            spiral=self.spiral,
        )
