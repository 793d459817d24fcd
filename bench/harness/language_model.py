"""The model `sigma0` of lm-eval: every exit setting, batches that share their passes, and depths in the results."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string

from sigma0.bench.core.conditions import device_name, weights_sha256
from sigma0.bench.harness.arguments import open_model
from sigma0.bench.harness.scoring import Pair, Score, WriteSettings, read_exit, score, write
from sigma0.bench.harness.telemetry import DepthLog, DepthTally, Reading, counts
from sigma0.commands.console import progress_bar

# what a task gets that says nothing; lm-eval's own default
MAX_GEN_TOKS = 256
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@register_model("sigma0")
class Sigma0LM(LM):  # type: ignore[misc]
    """A looped model for lm-eval, by the arguments of `arguments.open_model`.

    `loglikelihood` is that of `scoring`: each token read at its own exit. `generate_until` writes at the same setting.
    Batches are as large as `batch_size` says, whatever `max_batch_size`; `depth_log` is a new file for the depths of
    every request, one JSON line each.

    Raises:
        ValueError: For an unknown argument or a bad value.
    """

    def __init__(
        self,
        model: str = "pocket",
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        depth_log: str | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__()
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ValueError(f"batch_size must be a whole number of at least 1, got {batch_size!r}")
        self.batch_size = int(batch_size)
        self.opened = open_model(model, arguments)
        self.tokenizer = self.opened.tokenizer
        self.exit_config = self.opened.exit_at()
        self.max_length = int(self.opened.model.config.max_position_embeddings)
        self._device = self.opened.model.device
        self._log = DepthLog(depth_log)
        self._tallies: dict[str, DepthTally] = {}
        self._tasks: dict[str, DepthTally] = {}

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Mapping[str, Any] | None = None) -> "Sigma0LM":
        """As lm-eval's own, but what `--model_args` says of the device wins over `--device`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> "Sigma0LM":
        """Likewise."""
        given = {name: value for name, value in (additional_config or {}).items() if value is not None}
        return cls(**{**given, **arg_dict})

    @property
    def tokenizer_name(self) -> str:
        """Tells lm-eval's request cache one tokenizer from another."""
        return self.opened.name.replace("/", "__")

    @property
    def prefix_token_id(self) -> int:
        """What stands ahead of a text that has no context."""
        bos = self.tokenizer.bos_token_id
        return int(self.tokenizer.eos_token_id if bos is None else bos)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template that lm-eval writes down; there is one for each tokenizer."""
        template = self.tokenizer.chat_template
        return str(template) if chat_template and template is not None else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Messages as one prompt."""
        goes_on = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        return str(self.tokenizer.apply_chat_template(chat_history, tokenize=False, **goes_on))

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether greedy reading at these exits would have written it."""
        pairs = [self._pair(*request.args) for request in requests]
        result: dict[int, tuple[float, bool]] = {}
        with progress_bar("loglikelihood", len(pairs), disable_tqdm) as advance:
            for number, scored in self._score("loglikelihood", pairs, requests):
                result[number] = (scored.logprob, scored.is_greedy)
                self.cache_hook.add_partial("loglikelihood", requests[number].args, result[number])
                advance(len(result))
        return [result[number] for number in range(len(pairs))]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each text, in windows where it exceeds the context; every token is predicted once."""
        pairs: list[Pair] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            ids = self._encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                context, continuation = make_disjoint_window(window)
                pairs.append(Pair(tuple(context), tuple(continuation)))
                owners.append(owner)
        sums = [0.0] * len(requests)
        with progress_bar("loglikelihood_rolling", len(pairs), disable_tqdm) as advance:
            asked = [requests[owner] for owner in owners]
            for done, (number, scored) in enumerate(self._score("loglikelihood_rolling", pairs, asked), start=1):
                sums[owners[number]] += scored.logprob
                advance(done)
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Writes each text; requests with the same settings share batches, the longest prompts first."""
        prompts = [self._encode(request.args[0]) or [self.prefix_token_id] for request in requests]
        alike: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        texts: dict[int, str] = {}
        with progress_bar("generate_until", len(requests), disable_tqdm) as advance:
            for group in alike.values():
                settings = write_settings(requests[group[0]].args[1], self)
                for numbers in self._batches(sorted(group, key=lambda number: -len(prompts[number]))):
                    batch = write(self.opened.model, self.tokenizer, [prompts[item] for item in numbers], settings)
                    self._tally("generate_until").add_batch(batch.readings, batch.cost)
                    for number, text, reading in zip(numbers, batch.texts, batch.readings, strict=True):
                        texts[number] = text
                        self._tell("generate_until", requests[number], reading)
                        self.cache_hook.add_partial("generate_until", requests[number].args, text)
                    advance(len(texts))
        return [texts[number] for number in range(len(requests))]

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its results: the setting, and where tokens were read in this run.

        Requests that lm-eval answered from its own cache are not counted.
        """
        model = self.opened.model
        return {
            "sigma0": {
                "model": self.opened.name,
                "model_sha256": weights_sha256(self.opened.name),
                "dtype": str(model.dtype).removeprefix("torch."),
                "device": device_name(model.device),
                "total_loops": model.num_loops,
                "effort": self.opened.effort,
                "exit_config": self.exit_config.to_dict(),
                "scored_with": read_exit(self.exit_config).to_dict(),
                "requests": {name: tally.to_dict() for name, tally in self._tallies.items()},
                "tasks": {name: tally.to_dict() for name, tally in self._tasks.items()},
            }
        }

    def _score(self, kind: str, pairs: Sequence[Pair], requests: Sequence[Any]) -> Iterator[tuple[int, Score]]:
        for number, scored in score(self.opened.model, pairs, self.exit_config, self.batch_size):
            self._tally(kind).add(scored.reading, written=False)
            self._tell(kind, requests[number], scored.reading)
            yield number, scored

    def _pair(self, context: str, continuation: str) -> Pair:
        """Ids of a context and what follows, split as lm-eval's other models split them."""
        if not context:
            ids = self._encode(continuation)
            return Pair((self.prefix_token_id,), tuple(ids[1:] if ids[:1] == [self.prefix_token_id] else ids))
        # spaces at the end belong to the word after them
        spaces = len(context) - len(context.rstrip())
        whole = self._encode(context + continuation)
        ahead = self._encode(context[: len(context) - spaces])
        return Pair(tuple(whole[: len(ahead)]), tuple(whole[len(ahead) :]))

    def _encode(self, text: str) -> list[int]:
        bos = self.tokenizer.bos_token
        # a chat template has written it already
        special = not (bos and text.startswith(bos))
        return list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def _batches(self, numbers: Sequence[int]) -> Iterator[Sequence[int]]:
        for start in range(0, len(numbers), self.batch_size):
            yield numbers[start : start + self.batch_size]

    def _tally(self, kind: str) -> DepthTally:
        return self._tallies.setdefault(kind, DepthTally(self.opened.model.num_loops))

    def _tell(self, kind: str, request: Any, reading: Reading) -> None:
        task = str(request.task_name)
        tally = self._tasks.setdefault(task, DepthTally(self.opened.model.num_loops))
        tally.add(reading, written=kind == "generate_until")
        output = {"request": kind, "task": request.task_name, "doc_id": request.doc_id, "idx": request.idx}
        self._log.write({**output, **counts(reading), "depths": list(reading.depths), "truncated": reading.truncated})


def write_settings(asked: Mapping[str, Any], model: Sigma0LM) -> WriteSettings:
    """A task's generation settings."""
    unknown = sorted(set(asked) - {"until", "do_sample", *LENGTHS, *SAMPLING})
    if unknown:
        raise ValueError(f"sigma0 writes without {', '.join(unknown)}: take it out of the task's generation_kwargs")
    until = asked.get("until") or []
    strings = (until,) if isinstance(until, str) else tuple(until)
    if not all(isinstance(string, str) and string for string in strings):
        raise ValueError(f"until must be strings that are not empty, got {until!r}")
    lengths = [int(asked[name]) for name in LENGTHS if asked.get(name) is not None]
    length = lengths[0] if lengths else MAX_GEN_TOKS
    if length < 1:
        raise ValueError(f"max_gen_toks must be at least 1, got {length}")
    return WriteSettings(model.exit_config, length, strings, _sampling(asked))


def _sampling(asked: Mapping[str, Any]) -> dict[str, Any]:
    """For transformers' `generate`; a temperature asks for sampling unless `do_sample` forbids it, and 0 is greedy."""
    given = {name: asked[name] for name in SAMPLING if asked.get(name) is not None}
    asks = asked.get("do_sample")
    temperature = given.get("temperature", 1.0 if asks else 0.0)
    if temperature > 0 and (asks is None or asks):
        return {"do_sample": True, **given}
    # transformers warns of settings that only sampling reads
    return {"do_sample": False, **{name: value for name, value in given.items() if name == "repetition_penalty"}}
