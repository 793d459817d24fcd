"""The model provider `sigma0` of Inspect: `inspect eval task.py --model sigma0/pocket -M exit=qexit -M q=0.6`."""

import time
from collections.abc import Sequence
from typing import Any

from anyio import to_thread
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessageAssistant,
    GenerateConfig,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    modelapi,
)

from sigma0.api import generate
from sigma0.bench.harness.arguments import Opened, check_effort, open_model
from sigma0.bench.harness.telemetry import Reading, counts
from sigma0.decode.detokenizer import truncate_at_stop
from sigma0.models.prompts import encode
from sigma0.signals.generation import Generation

# new tokens where nobody says how many; less where the context ends earlier
MAX_TOKENS = 512
# settings that would change the text or the answer's form, and that this provider does not have
REFUSED = (
    *("best_of", "frequency_penalty", "logit_bias", "logprobs", "num_choices"),
    *("presence_penalty", "prompt_logprobs", "response_schema", "top_logprobs"),
)
SAMPLING = ("temperature", "top_p", "top_k")


@modelapi(name="sigma0")
class Sigma0API(ModelAPI):  # type: ignore[misc]
    """A looped model in this process, one request at a time.

    It takes the arguments of `arguments.open_model`.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig | None = None,
        **model_args: Any,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config or GenerateConfig())
        if base_url is not None:
            raise ValueError(
                f"sigma0/{model_name} runs in this process and has no base_url {base_url!r}; a sigma0 server is asked "
                "through openai-api"
            )
        self.opened = open_model(model_name, model_args)
        if self.opened.tokenizer.chat_template is None:
            raise ValueError(f"{model_name!r} has no chat template, so that it cannot be asked in messages")

    async def generate(self, input: Sequence[Any], tools: Sequence[Any], tool_choice: Any, config: Any) -> Any:
        """Answers; see Inspect's `ModelAPI.generate`.

        `temperature` is 0 where none is given, and `reasoning_effort` is depth (`sigma0.config`).

        Returns:
            The output. `metadata["sigma0"]` holds verdict, door, depths, savings and the setting in force.

        Raises:
            ValueError: For tools, for messages that are not text, and for settings that have no meaning here.
        """
        if tools:
            raise ValueError(f"sigma0/{self.model_name} calls no tools, got {len(tools)}")
        asked = [name for name in REFUSED if getattr(config, name, None) not in (None, False)]
        if asked and not (asked == ["num_choices"] and config.num_choices == 1):
            raise ValueError(f"sigma0/{self.model_name} has no {', '.join(asked)}: leave it out")
        effort = self.opened.effort if config.reasoning_effort is None else check_effort(config.reasoning_effort)
        messages = [_plain(message) for message in input]
        return await to_thread.run_sync(self._answer, messages, effort, config)

    async def count_text_tokens(self, text: str) -> int:
        """Ids of a text."""
        return len(self.opened.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def max_tokens(self) -> int:
        """New tokens where nobody says how many."""
        return min(MAX_TOKENS, int(self.opened.model.config.max_position_embeddings) // 2)

    def max_connections(self) -> int:
        """One: a second request would wait for the first."""
        return 1

    def _answer(self, messages: list[dict[str, str]], effort: str, config: Any) -> Any:
        opened = self.opened
        asked = config.max_tokens or self.max_tokens()
        prompt = encode(opened.tokenizer, messages).shape[1]
        room = int(opened.model.config.max_position_embeddings) - prompt
        if room < 1:
            full = f"the prompt of {prompt} tokens fills the context of {room + prompt}"
            return ModelOutput.from_content(self.model_name, full, stop_reason="model_length", error=full)
        stop = tuple(config.stop_seqs or ())
        exit_config = opened.exit_at(effort)
        with opened.loaded.alone:
            began = time.monotonic()
            settings: dict[str, Any] = {"exit_config": exit_config, "max_new_tokens": min(asked, room), "stop": stop}
            # collapse is as `model.generate` has it, which the other harness calls
            settings |= {"seed": config.seed, "verdict": True, "on_collapse": "ignore", **_sampling(config)}
            written = generate(opened.model, opened.tokenizer, messages, **settings)
            seconds = time.monotonic() - began
        ended = written.stop_reason != "length"
        why = "stop" if ended else "max_tokens" if asked <= room else "model_length"
        text = truncate_at_stop(written.text, stop)
        message = ChatMessageAssistant(content=text, model=self.model_name, source="generate")
        read, new = written.prompt_tokens, len(written.tokens)
        return ModelOutput(
            model=self.model_name,
            choices=[ChatCompletionChoice(message=message, stop_reason=why)],
            usage=ModelUsage(input_tokens=read, output_tokens=new, total_tokens=read + new),
            time=seconds,
            metadata={"sigma0": {**told(written, opened), "effort": effort, "exit_config": exit_config.to_dict()}},
        )


def told(written: Generation, opened: Opened) -> dict[str, Any]:
    """What the output's metadata says of a text: plain JSON values."""
    assert written.verdict is not None
    reading = Reading(tuple(token.depth for token in written.tokens), tuple(token.reason for token in written.tokens))
    costs = "mean_depth depth_saved passes_saved rows_saved loop_passes loop_rows prompt_rows"
    return {
        "model": opened.name,
        "verdict": written.verdict.to_dict(),
        "door": written.door,
        "total_loops": written.total_loops,
        **counts(reading),
        **{name: getattr(written, name) for name in costs.split()},
    }


def _sampling(config: Any) -> dict[str, Any]:
    """For `sigma0.generate`; without a temperature, or with one of 0, greedy."""
    if not config.temperature:
        return {"do_sample": False}
    given = {name: getattr(config, name) for name in SAMPLING if getattr(config, name) is not None}
    return {"do_sample": True, **given}


def _plain(message: Any) -> dict[str, str]:
    if message.role not in ("system", "user", "assistant"):
        raise ValueError(f"a sigma0 model reads messages of system, user and assistant, got one of {message.role!r}")
    kinds = set() if isinstance(message.content, str) else {part.type for part in message.content}
    if not kinds <= {"text", "reasoning"}:
        raise ValueError(f"a sigma0 model reads text, got {', '.join(sorted(kinds - {'text', 'reasoning'}))}")
    return {"role": message.role, "content": message.text}
