"""The rungs of a ladder: local models, looped or not, and endpoints that speak OpenAI's protocol."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from pydantic import SecretStr
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from sigma0.config import Effort, ExitConfig, exit_for
from sigma0.decode.detokenizer import eos_ids
from sigma0.ladder.budget import Price, RungCost
from sigma0.models.hf_generate import DepthGenerationMixin

# Texts that two tokenizers must take apart alike: digits, spaces, scripts, bytes that are no character, specials.
PROBES = (
    "The cat sat on the mat.",
    "  leading  and   many spaces\n\n\ttabs",
    "1234567890 3.14159 1,000,000",
    "naïve café — “quotes” … 你好 مرحبا 🙂👩‍🚀",
    "def f(x):\n    return x ** 2  # square\n",
    "<|im_start|>user\nHi<|im_end|>\n</s><s>",
    "e\u0301 \u00e9 \ufb01 \u2126 \x00\x7f",
)

Declines = Callable[[str], bool]


def declines_nothing(text: str) -> bool:
    """Takes every answer but an empty one."""
    return not text.strip()


@dataclass(frozen=True)
class LocalRung:
    """A causal model of transformers in this process.

    Attributes:
        name: In costs and trails.
        model: LoopOutput or not.
        tokenizer: Its fast tokenizer.
        exit_config: Default of a looped model; None: its checkpoint's.
        kv_limit: Bytes of K/V that may stay between two forwards; more is dropped and recomputed. None: no limit.
        declines: Whether a text is no answer, so that the next rung is tried; by default an empty one.
    """

    name: str
    model: PreTrainedModel = field(repr=False)
    tokenizer: PreTrainedTokenizerFast = field(repr=False)
    exit_config: ExitConfig | None = None
    kv_limit: int | None = None
    declines: Declines = declines_nothing

    @property
    def is_looped(self) -> bool:
        """Whether the model has loops."""
        return isinstance(self.model, DepthGenerationMixin)

    @property
    def block(self) -> nn.Module:
        """The layers that a pass runs: a core and its adapter, else the largest list of modules."""
        if (core := getattr(self.model.base_model, "core_block", None)) is not None:
            return nn.ModuleList([self.model.base_model.adapter, *core])
        lists = [module for module in self.model.modules() if isinstance(module, nn.ModuleList)]
        if not lists:
            raise ValueError(f"rung {self.name!r}: {type(self.model).__name__} has no list of layers")
        return max(lists, key=lambda layers: sum(parameter.numel() for parameter in layers.parameters()))

    def new_cost(self) -> RungCost:
        """Of nothing yet."""
        # a pass with a stride reads its block several times
        loops, block = getattr(self.model.config, "stride", 1), list(self.block.parameters())
        return RungCost(
            self.name,
            block_bytes=loops * sum(parameter.nbytes for parameter in block),
            parameters=loops * sum(parameter.numel() for parameter in block),
        )

    def beside_bytes(self, entries: int, readings: int) -> int:
        """Bytes of a prelude that is run for so many entries, and of a coda that is run for so many readings."""
        times = {"prelude": entries, "coda": readings}
        stages = {name: getattr(self.model.base_model, name, nn.Identity()).parameters() for name in times}
        return sum(count * sum(weight.nbytes for weight in stages[name]) for name, count in times.items())

    @property
    def eos(self) -> frozenset[int]:
        """Ids that end a text."""
        return eos_ids(self.model.generation_config.eos_token_id)

    def to_dict(self) -> dict[str, Any]:
        """What a trail says of it."""
        return {"kind": "local", "name": self.name, "model": type(self.model).__name__, "looped": self.is_looped}


@dataclass(frozen=True)
class EndpointRung:
    """A server that speaks OpenAI's chat protocol.

    Attributes:
        name: In costs and trails.
        base_url: As the `openai` client takes it.
        model: The server's name for it.
        api_key: Shown nowhere.
        timeout: Seconds for one request at most.
        attempts: How often a failed request is sent at most.
        backoff: Seconds before the second attempt; doubled for each further one.
        price: For the budget's money.
        declines: As for a local rung.
    """

    name: str
    base_url: str
    model: str
    api_key: SecretStr = field(repr=False)
    timeout: float = 60.0
    attempts: int = 3
    backoff: float = 0.5
    price: Price = field(default_factory=Price)
    declines: Declines = declines_nothing

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        odd = parts.username or parts.password or parts.query or parts.fragment
        if parts.scheme not in ("http", "https") or not parts.hostname or odd:
            raise ValueError(
                "base_url must be http(s)://host/... without user, query or fragment, "
                f"got {parts.hostname or 'no host'!r}"
            )
        key = self.api_key.get_secret_value()
        if not key or not key.isprintable() or " " in key:
            raise ValueError("api_key is empty, or holds spaces or signs that no header can (it is not shown here)")
        if not 0 < self.timeout < float("inf") or self.attempts < 1 or not 0 <= self.backoff < float("inf"):
            raise ValueError(
                f"timeout must be above 0, attempts at least 1 and backoff at least 0; got {self.timeout}, "
                f"{self.attempts} and {self.backoff}"
            )

    def to_dict(self) -> dict[str, Any]:
        """What a trail says of it: host and model, no key."""
        return {"kind": "endpoint", "name": self.name, "host": urlsplit(self.base_url).hostname, "model": self.model}


AnyRung = LocalRung | EndpointRung


def at_effort(rung: AnyRung, effort: Effort) -> AnyRung:
    """A rung with its exit setting at an effort; one without loops as it is.

    Args:
        rung: Of any kind.
        effort: Changes over the rung's setting, or its checkpoint's: see `sigma0.config`.
    """
    if isinstance(rung, EndpointRung) or not rung.is_looped:
        return rung
    setting = rung.model.resolve_exit_config(rung.exit_config)
    return replace(rung, exit_config=exit_for(effort, setting, rung.model.num_loops))


class Rung:
    """How rungs are made."""

    @staticmethod
    def local(
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        name: str | None = None,
        exit_config: ExitConfig | Mapping[str, Any] | None = None,
        kv_limit: int | None = None,
        declines: Declines | None = None,
    ) -> LocalRung:
        """A model in this process.

        Args:
            model: Any causal model of transformers, looped or not.
            tokenizer: Its fast tokenizer.
            name: In costs and trails; by default the model's own.
            exit_config: Of a looped model, where a call asks for none; by default as its checkpoint says.
            kv_limit: Bytes of K/V that may stay between two readings.
            declines: Says of an answer that it is none.

        Raises:
            ValueError: For a tokenizer that is not fast, an exit rule for a model without loops, or a limit under 1.
        """
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(f"a fast tokenizer is needed, got {type(tokenizer).__name__}")
        if kv_limit is not None and kv_limit < 1:
            raise ValueError(f"kv_limit is a number of bytes of at least 1, got {kv_limit}")
        label = name or str(getattr(model.config, "name_or_path", "") or type(model).__name__)
        config = None if exit_config is None else ExitConfig.parse(exit_config)
        rung = LocalRung(label, model, tokenizer, config, kv_limit, declines or declines_nothing)
        if config is not None and not rung.is_looped:
            raise ValueError(f"rung {label!r}: {type(model).__name__} has no loops to exit from: leave exit_config out")
        return rung

    @staticmethod
    def endpoint(
        base_url: str, model: str, api_key: str = "none", name: str | None = None, **settings: Any
    ) -> EndpointRung:
        """A server.

        Args:
            base_url: As the `openai` client takes it, for example `http://127.0.0.1:8000/v1`.
            model: The server's name for it.
            api_key: Shown nowhere.
            name: In costs and trails; by default `model`.
            **settings: `timeout`, `attempts`, `backoff`, `price`, `declines`.

        Raises:
            ValueError: For a bad address or setting.
        """
        return EndpointRung(name or model, base_url, model, SecretStr(api_key.strip()), **settings)


def check_same_tokens(lower: LocalRung, upper: LocalRung) -> None:
    """Refuses two rungs whose ids mean different things.

    Raises:
        ValueError: Naming the difference, and drafts and answers as the way out.
    """
    difference = _difference(lower.tokenizer, upper.tokenizer)
    if difference is not None:
        raise ValueError(
            f"rungs {lower.name!r} and {upper.name!r} do not share a tokenizer: {difference}. Single tokens cannot go "
            "up between them; whole texts can: use unit='draft' or unit='answer'"
        )


def _difference(lower: PreTrainedTokenizerFast, upper: PreTrainedTokenizerFast) -> str | None:
    mine, other = lower.get_vocab(), upper.get_vocab()
    if mine != other:
        odd = min(key for key in mine.keys() | other.keys() if mine.get(key) != other.get(key))
        return f"{odd!r} is {mine.get(odd)} in one vocabulary and {other.get(odd)} in the other"
    for name in ("bos_token_id", "eos_token_id"):
        if getattr(lower, name) != getattr(upper, name):
            return f"{name} is {getattr(lower, name)} and {getattr(upper, name)}"
    for probe in PROBES:
        ids = [tokenizer(probe, add_special_tokens=True)["input_ids"] for tokenizer in (lower, upper)]
        if ids[0] != ids[1]:
            return f"{probe[:20]!r} is taken apart otherwise"
        if lower.decode(ids[0]) != upper.decode(ids[1]):
            return f"{probe[:20]!r} is put together otherwise"
    return None
