"""The budget of a ladder, and the purse that is checked before anything is spent."""

import time
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as checked

Count = Annotated[int, Field(ge=0)] | None
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)] | None


@checked(frozen=True, config=ConfigDict(extra="forbid"))
class Budget:
    """Hard limits over one call of a ladder, all sequences of a batch together; None sets none.

    Attributes:
        loop_passes: Passes of the rungs' blocks, prompts included; of a model that is not looped each forward is one.
        large_tokens: Tokens written by rungs above the lowest.
        catch_up_tokens: Ids that rungs above the lowest read, prompts included.
        calls: Requests to endpoints, repeated ones included.
        seconds: Since the call began. A step is not begun if the longest one of its kind so far would not fit; what
            is under way is only cut off at an endpoint.
        money: In the unit of the rungs' prices.
    """

    loop_passes: Count = None
    large_tokens: Count = None
    catch_up_tokens: Count = None
    calls: Count = None
    seconds: Amount = None
    money: Amount = None

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """Limits from `name=value,name=value`.

        Raises:
            ValueError: For an unknown name or a bad value.
        """
        values: dict[str, Any] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, equals, value = part.partition("=")
            if not equals or name not in (known.name for known in fields(cls)):
                known_names = ", ".join(known.name for known in fields(cls))
                raise ValueError(f"budget {part!r} is not name=value with a name of {known_names}")
            if name in values:
                raise ValueError(f"budget {name!r} is given twice")
            values[name] = value
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The limits that are set."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Price:
    """Prices of an endpoint, in any unit of money.

    Attributes:
        prompt_token: For each token read.
        new_token: For each token written.
        call: For each request.
    """

    prompt_token: float = 0.0
    new_token: float = 0.0
    call: float = 0.0

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"price {limit.name} must be a finite number of at least 0, got {value!r}")

    def of(self, prompt_tokens: int, new_tokens: int) -> float:
        """Price of one request."""
        return self.call + prompt_tokens * self.prompt_token + new_tokens * self.new_token


@dataclass(frozen=True)
class Spending:
    """An amount of each limit of a `Budget` but time.

    Attributes:
        loop_passes: Passes of the rungs' blocks.
        large_tokens: Written above the lowest rung.
        catch_up_tokens: Read above the lowest rung.
        calls: Requests.
        money: Paid.
    """

    loop_passes: int = 0
    large_tokens: int = 0
    catch_up_tokens: int = 0
    calls: int = 0
    money: float = 0.0

    def plus(self, other: "Spending") -> "Spending":
        """The sum."""
        return Spending(**{item.name: getattr(self, item.name) + getattr(other, item.name) for item in fields(self)})


@dataclass
class BudgetTracker:
    """A budget being spent."""

    budget: Budget  # The limits
    spent: Spending = field(default_factory=Spending)  # Spent so far
    began: float = field(default_factory=time.monotonic)  # When the call began, by `time.monotonic`
    longest: dict[str, float] = field(default_factory=dict)  # Seconds of the longest step of each kind
    refused: set[str] = field(default_factory=set)  # The limits for which steps were refused

    @property
    def seconds(self) -> float:
        """Since the call began."""
        return time.monotonic() - self.began

    @property
    def seconds_left(self) -> float | None:
        """None where time is not limited."""
        return None if self.budget.seconds is None else self.budget.seconds - self.seconds

    def lacks(self, step: Spending, kind: str) -> str | None:
        """The first limit that a step would exceed, or None; adds it to `refused`.

        Args:
            step: Upper bound of its cost.
            kind: Kind of the step, for its time.
        """
        after = self.spent.plus(step)
        for name in (item.name for item in fields(Spending)):
            limit = getattr(self.budget, name)
            if limit is not None and getattr(after, name) > limit:
                self.refused.add(name)
                return name
        left = self.seconds_left
        if left is not None and left <= self.longest.get(kind, 0.0):
            self.refused.add("seconds")
            return "seconds"
        return None

    def pay(self, cost: Spending, kind: str, seconds: float) -> None:
        """Notes what a step did cost."""
        self.spent = self.spent.plus(cost)
        self.longest[kind] = max(self.longest.get(kind, 0.0), seconds)


@dataclass
class RungCost:
    """What one rung did.

    Attributes:
        name: Of the rung.
        tokens: Tokens of the text that it wrote.
        passes: Passes of its block after prompts; of a model without loops each such forward is one.
        prompt_passes: The same of prompts and of catching up, which run at full depth.
        rows: Rows (a token in a pass) in both.
        read: Ids that it read in prompts and in catching up.
        catch_ups: How often it caught up on ids that another rung wrote.
        refills: How often everything was recomputed, since its K/V had been dropped.
        calls: Requests, repeated ones included.
        money: Paid.
        seconds: Spent in it.
        beside_bytes: Bytes that were read of a prelude's weights, once for each pass that tokens enter in, and of a
            coda's, once for each pass in which tokens are read; 0 of a model whose layers all loop, or none.
        block_bytes: Bytes of its block's weights; 0 for an endpoint.
        parameters: Numbers in its block; 0 for an endpoint.
    """

    name: str
    tokens: int = 0
    passes: int = 0
    prompt_passes: int = 0
    rows: int = 0
    read: int = 0
    catch_ups: int = 0
    refills: int = 0
    calls: int = 0
    money: float = 0.0
    seconds: float = 0.0
    beside_bytes: int = 0
    block_bytes: int = 0
    parameters: int = 0

    @property
    def bytes_read(self) -> int:
        """Passes times block bytes, prompts included, and what lies beside: the cost that rungs are compared by."""
        return (self.passes + self.prompt_passes) * self.block_bytes + self.beside_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "bytes_read": self.bytes_read, "row_parameters": self.rows * self.parameters}

    def plus(self, other: "RungCost") -> "RungCost":
        """The sum over runs of one rung."""
        same = ("name", "block_bytes", "parameters")
        sums = {
            item.name: getattr(self, item.name) + getattr(other, item.name)
            for item in fields(self)
            if item.name not in same
        }
        return replace(self, **sums)


def total_bytes(costs: tuple[RungCost, ...]) -> int:
    """The one figure for plots: bytes read over all rungs."""
    return sum(cost.bytes_read for cost in costs)
