"""Four items of general knowledge, and the very calls that each level makes for them: what was asked and answered."""

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from sigma0.bench.strategyqa.asking import Ask
from sigma0.bench.strategyqa.items import Item
from sigma0.bench.strategyqa.level import Question
from sigma0.bench.strategyqa.registry import EXPERIMENTS, Makings
from sigma0.reason.chat import ScriptedChat
from sigma0.reason.messages import Completion
from sigma0.signals.verdict import ReasonVerdict

_FOLDER = Path(__file__).parent
_BOTH = TypeAdapter(dict[str, list[Item]]).validate_json((_FOLDER / "items.json").read_bytes())
ITEMS, TRAIN = _BOTH["dev"], _BOTH["train"]
# of which the scripted model answers the third wrongly
RIGHT = [True, True, False, True]
GOOD = ReasonVerdict(
    converged=True, depth=2.0, proximity=0.1, grounded=None, stable="contract", reason="threshold_met", confidence=0.95
)
# one objection, and two
SPIRAL = GOOD.model_copy(update={"stable": "spiral"})
LOST = GOOD.model_copy(update={"converged": False, "proximity": 0.9, "stable": "diverge", "reason": "divergence"})
_VERDICTS = {None: None, "good": GOOD, "spiral": SPIRAL, "lost": LOST}


@dataclass(frozen=True)
class Call:
    """A call that must come, word for word, and what the scripted model says to it."""

    purpose: str
    prompt: str
    stop: tuple[str, ...]
    reply: Completion


# by level and item; a level's name has its route after it
CALLS: dict[str, list[list[Call]]] = {}
for _line in (_FOLDER / "calls.jsonl").read_text(encoding="utf-8").splitlines():
    _told = json.loads(_line)
    _reply = Completion(_told["reply"], verdict=_VERDICTS[_told.get("verdict")], door=_told.get("door"))
    _items = CALLS.setdefault(_told["level"], [[] for _ in ITEMS])
    _items[_told["item"]].append(Call(_told["purpose"], _told["prompt"], tuple(_told["stop"]), _reply))


def act(action, argument):
    return f"Thought: I should {action} now.\nAction: {action}[{argument}]"


def asked(level, question, *replies):
    """What a level makes of a question or of its text, and the purposes and prompts of its calls."""
    ask = Ask(ScriptedChat(replies))
    question = question if isinstance(question, Question) else Question("new", question)
    return level.predict(question, ask), [(item.purpose, item.prompt) for item in ask.asked]


def made(name, train=TRAIN):
    registered, _, route = name.partition(" by ")
    return EXPERIMENTS[registered](Makings(train=train, route=route or "rules"))
