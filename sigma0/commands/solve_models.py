"""The models that `sigma0 solve` asks, from the command line: local, on a server, or the rungs of a ladder."""

from itertools import pairwise
from pathlib import Path

from sigma0.checkpoints import CHECKPOINTS
from sigma0.checkpoints.about import Form, read_about
from sigma0.ladder import Budget, FidelityLadder, LocalRung, Rung
from sigma0.ladder.rungs import AnyRung, check_same_tokens
from sigma0.models.load import load_causal
from sigma0.reason.chat import ChatModel, EndpointChat, LadderChat, LocalChat


def open_chats(model: str, ladder: str | None, base_url: str | None, device: str, dtype: str) -> list[ChatModel]:
    """Chat models, the cheapest first.

    They are a model by its shipped name, folder or hub id; a server's, by its name there and the address of the server,
    which speaks OpenAI's protocol and has its key in the variable OPENAI_API_KEY; or comma-separated rungs,
    each a model, or `name@http://host/v1`.
    """
    if ladder is not None and base_url is not None:
        raise ValueError("--ladder and --base-url exclude each other: a rung may be name@http://host/v1")
    if base_url is not None:
        return [EndpointChat(base_url, model)]
    names = [model] if ladder is None else [name for part in ladder.split(",") if (name := part.strip())]
    if not names:
        raise ValueError("--ladder names no rung")
    chats: list[ChatModel] = []
    for name in names:
        asked, at, url = (name, "", "") if ladder is None else name.partition("@")
        local = None if at else LocalChat(*load_causal(asked, device=device, dtype=dtype), Path(asked).name)
        chats.append(local or EndpointChat(url, asked))
    return chats


def source(chat: ChatModel) -> str:
    """Where a model comes from, to tell apart two of one name: an address, a folder, a hub id or a shipped name."""
    if isinstance(chat, EndpointChat):
        return chat.rung.base_url
    assert isinstance(chat, LocalChat)
    name: str = chat.model.name_or_path
    folder = Path(name).resolve()
    if not folder.is_dir():
        return name
    return folder.name if folder.parent == CHECKPOINTS.resolve() else str(folder)


def follows_instructions(chats: list[ChatModel]) -> bool:
    """Whether the model that is asked first takes a problem with words around it.

    A checkpoint says so itself (`sigma0_prompts` in its `config.json`); of a server nothing else is known.
    """
    lowest = chats[0]
    config = lowest.model.config if isinstance(lowest, LocalChat) else None
    return getattr(config, "sigma0_prompts", "instructions") != "bare"


def known_forms(chats: list[ChatModel]) -> frozenset[Form]:
    """The forms of `sigma0.reason.forms` that the model that is asked first was taught, as its card says."""
    lowest = chats[0]
    about = read_about(lowest.model.name_or_path) if isinstance(lowest, LocalChat) else None
    return frozenset(() if about is None else about.forms)


def as_ladder(chats: list[ChatModel]) -> tuple[ChatModel, bool]:
    """Several chat models as one ladder; one model stays as it is.

    Returns:
        The model, and whether it can sample: single tokens go up where all rungs are here and share a tokenizer, else
        whole answers do, which are greedy.
    """
    if len(chats) == 1:
        return chats[0], True
    rungs: list[AnyRung] = []
    for chat in chats:
        if isinstance(chat, LocalChat):
            rungs.append(Rung.local(chat.model, chat.tokenizer, chat.name))
        else:
            assert isinstance(chat, EndpointChat)
            rungs.append(chat.rung)
    by_token = _share_tokens(rungs)
    return LadderChat(FidelityLadder(rungs, Budget()), "token" if by_token else "answer"), by_token


def _share_tokens(rungs: list[AnyRung]) -> bool:
    """Whether all are here and have one vocabulary: of two, single tokens mean different things."""
    local = [rung for rung in rungs if isinstance(rung, LocalRung)]
    try:
        for lower, upper in pairwise(local):
            check_same_tokens(lower, upper)
    except ValueError:
        return False
    return len(local) == len(rungs)
