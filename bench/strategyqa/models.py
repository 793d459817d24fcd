"""Who is asked, and what tells it from another of the same name."""

from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from sigma0.bench.core.digests import settings_sha256, weights_sha256
from sigma0.bench.strategyqa.batched import BatchedChat
from sigma0.commands.solve_models import as_ladder, open_chats
from sigma0.reason.chat import ChatModel, EndpointChat, LocalChat


@dataclass(frozen=True)
class Asked:
    """A model that answers.

    Attributes:
        chat: It.
        identity: Digest of its weights; of an endpoint, of its address.
        settings: Digest of its other files; of an endpoint, of nothing.
        model: Of transformers, where it is here; of a ladder the lowest rung's; None of an endpoint.
        samples: Whether it can sample.
    """

    chat: ChatModel
    identity: str
    settings: str
    model: Any
    samples: bool

    @property
    def dtype(self) -> str:
        """What the model computes in."""
        return "not known" if self.model is None else str(self.model.dtype).removeprefix("torch.")


def open_model(model: str, ladder: str | None, base_url: str | None, device: str, dtype: str, batch_size: int) -> Asked:
    """The model that the command line names.

    Args:
        model: As `open_chats` takes it, like the next four.
        ladder: Rungs.
        base_url: Of an endpoint.
        device: For models here.
        dtype: For models here.
        batch_size: Greedy questions that a model without loops answers at a time.

    Raises:
        ValueError: As `open_chats` does.
    """
    chats = open_chats(model, ladder, base_url, device, dtype)
    names = [name.strip() for name in (ladder or model).split(",") if name.strip()]
    pairs = list(zip(chats, names, strict=True))
    identity = _digest([_identity(chat, name) for chat, name in pairs])
    settings = _digest(["" if isinstance(chat, EndpointChat) else settings_sha256(name) for chat, name in pairs])
    first = chats[0].model if isinstance(chats[0], LocalChat) else None
    chat, samples = as_ladder(chats)
    if isinstance(chat, LocalChat) and not chat.is_looped and batch_size > 1:
        chat = BatchedChat(chat, batch_size)
    return Asked(chat, identity, settings, first, samples)


def _identity(chat: ChatModel, name: str) -> str:
    if isinstance(chat, EndpointChat):
        return sha256(f"{chat.rung.base_url} {chat.rung.model}".encode()).hexdigest()
    return weights_sha256(name)


def _digest(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else sha256(" ".join(parts).encode()).hexdigest()
