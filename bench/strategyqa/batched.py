"""A model without loops that answers several threads in one batch: greedy questions that wait together go together."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Condition, Thread
from typing import Any

import torch

from sigma0.config import Messages
from sigma0.decode.detokenizer import eos_ids, truncate_at_stop
from sigma0.models.prompts import encode
from sigma0.reason.chat import LocalChat, fitted
from sigma0.reason.messages import DEFAULTS, ChatSettings, Completion, Usage

# seconds that a batch waits for company after its first question: those that were answered together come again
# together, but threads take a while, and a batch that left half of them behind costs nearly as much as a whole one
PATIENCE = 0.03
# the same as a share of what the batch before took
SHARE = 0.05


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A question on its way into a batch."""

    ids: torch.Tensor
    max_tokens: int
    stop: tuple[str, ...]
    answer: "Future[Completion]" = field(default_factory=Future)

    @property
    def kind(self) -> tuple[int, tuple[str, ...]]:
        """What questions of one batch have in common."""
        return self.max_tokens, self.stop


class BatchedChat:
    """A `LocalChat` without loops whose greedy questions are answered in batches; sampled ones are asked one by one."""

    def __init__(self, chat: LocalChat, batch_size: int) -> None:
        self.name = chat.name
        self.chat = chat
        self.batch_size = batch_size
        self._asked = Condition()
        self._waiting: list[_Waiting] = []
        self._patience = PATIENCE
        Thread(target=self._serve, daemon=True).start()

    def complete(self, messages: Messages, settings: ChatSettings = DEFAULTS) -> Completion:
        """See `ChatModel`."""
        if settings.temperature > 0:
            return self.chat.complete(messages, settings)
        settings = fitted(self.name, self.chat.model, self.chat.tokenizer, messages, settings)
        waiting = _Waiting(encode(self.chat.tokenizer, messages)[0], settings.max_tokens, settings.stop)
        with self._asked:
            self._waiting.append(waiting)
            self._asked.notify()
        return waiting.answer.result()

    def _serve(self) -> None:
        while True:
            batch = self._gather()
            try:
                answers = self._write(batch)
            except Exception as error:
                # raised again where each question waits; the next batch may fare better
                for item in batch:
                    item.answer.set_exception(error)
                continue
            for item, answer in zip(batch, answers, strict=True):
                item.answer.set_result(answer)

    def _gather(self) -> list[_Waiting]:
        """Questions of one kind, those that were left over first."""

        def alike() -> list[_Waiting]:
            return [item for item in self._waiting if item.kind == self._waiting[0].kind][: self.batch_size]

        with self._asked:
            self._asked.wait_for(lambda: self._waiting)
            self._asked.wait_for(lambda: len(alike()) == self.batch_size, self._patience)
            batch = alike()
            self._waiting = [item for item in self._waiting if item not in batch]
        return batch

    @torch.no_grad()
    def _write(self, batch: Sequence[_Waiting]) -> list[Completion]:
        began = time.monotonic()
        tokenizer, model = self.chat.tokenizer, self.chat.model
        padded = tokenizer.pad({"input_ids": [item.ids.tolist() for item in batch]}, return_tensors="pt")
        padded = {name: value.to(model.device) for name, value in padded.items() if name != "token_type_ids"}
        stop: dict[str, Any] = {"stop_strings": list(batch[0].stop), "tokenizer": tokenizer} if batch[0].stop else {}
        out = model.generate(**padded, max_new_tokens=batch[0].max_tokens, do_sample=False, **stop)
        width = padded["input_ids"].shape[1]
        took = time.monotonic() - began
        self._patience = max(PATIENCE, SHARE * took)
        return [self._completion(item, row[width:], took / len(batch)) for item, row in zip(batch, out, strict=True)]

    def _completion(self, asked: _Waiting, new: torch.Tensor, seconds: float) -> Completion:
        """What one row says, up to its own end: after it the batch holds pads."""
        ends = eos_ids(self.chat.model.generation_config.eos_token_id)
        ids = new.tolist()
        place = next((place for place, token in enumerate(ids) if token in ends), None)
        ids = ids if place is None else ids[: place + 1]
        text = str(self.chat.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        kept = truncate_at_stop(text, asked.stop)
        whole = place is not None or kept != text
        usage = Usage(1, len(asked.ids), len(ids), seconds=seconds)
        return Completion(kept, usage, None, "stop" if whole else "length")
