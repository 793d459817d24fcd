"""Request parsing: from a body to engine requests (ids, lengths, exit setting, sampling) and ladder tasks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from sigma0.config import Effort, ExitConfig, Messages, exit_for, switches
from sigma0.decode.grammar.spec import CallStyle, Spec, ToolCalls
from sigma0.decode.sampling_params import SamplingParams, check_logit_bias
from sigma0.models.prompts import encode
from sigma0.serve.api.access import ServerSettings
from sigma0.serve.api.bounds import TokenBound
from sigma0.serve.api.errors import ApiError
from sigma0.serve.api.protocol import COMPLETION_TOKENS, ChatRequest, CompletionRequest, Sigma0Options
from sigma0.serve.api.tools import call_style, check_history, tool_template
from sigma0.serve.engine.messages import EngineRequest, Service

if TYPE_CHECKING:
    from sigma0.serve.api.ladder import LadderRunner, LadderTask

Kind = Literal["chat", "completion"]
T = TypeVar("T")
# code of a request that a ladder cannot answer, though it would be answered without one
NOT_WITH_LADDER = "not_with_a_ladder"
NO_LADDER = (
    "sigma0.ladder: this server has no ladder; start it with one (its rungs are named when the server is started), "
    "or leave sigma0.ladder out"
)


@dataclass(frozen=True)
class Choice:
    """One choice of a response."""

    prompt: int  # Index of its prompt
    request: EngineRequest  # For the engine
    task: "LadderTask | None"  # For the ladder; None where the engine alone answers
    routed: bool  # Whether the engine answers first
    echo: str | None = None  # Text of the prompt, where it is sent back


@dataclass(frozen=True)
class ParsedRequest:
    """A parsed HTTP request."""

    kind: Kind  # Of the request, and so of the response
    choices: tuple[Choice, ...]  # In the order of their indices
    stream: bool  # Whether tokens are sent as they come
    include_usage: bool  # Whether a stream ends with the usage
    exit_config: ExitConfig  # The exit setting in force
    effort: Effort | None  # The effort that it comes from; None where the request named a setting, or neither
    trail: bool  # Whether a ladder's decisions are sent
    structured: str | None = None  # Field that says what the answers have to be; None where none does
    calls: ToolCalls | None = None  # What the choices may call; None for nothing
    only_prompt: bool = False  # Whether nothing of what is written is sent

    @property
    def grammar(self) -> Spec | None:
        """What the answers have to be."""
        return self.choices[0].request.grammar


class RequestParser:
    """Parses bodies; it tokenizes, so it should run in a thread.

    Args:
        service: The engine.
        settings: Limits.
        ladder_runner: The server's ladder, if it has one.
    """

    def __init__(self, service: Service, settings: ServerSettings, ladder_runner: "LadderRunner | None") -> None:
        self._service, self._settings, self._ladder_runner = service, settings, ladder_runner
        self.total_loops = int(service.model.num_loops)
        self.default_exit: ExitConfig = service.model.resolve_exit_config(None)
        self.context = service.context
        self._bound = TokenBound(service.tokenizer)
        self._most = min(settings.max_prompt_tokens or self.context, self.context)

    def parse(self, body: ChatRequest | CompletionRequest) -> ParsedRequest:
        """Parses a body.

        Raises:
            ApiError: For an unknown model, or a request that the limits or the model do not allow.
        """
        if body.model != self._service.name:
            message = f"the model {body.model[:80]!r} does not exist; this server has {self._service.name!r}"
            raise ApiError(404, message, "model", "model_not_found")
        options = body.sigma0 or Sigma0Options()
        self._check_sources(options)
        exit_config, effort = self._exit(body, options)
        choices = tuple(self._choices(body, options, exit_config, effort))
        grammar = choices[0].request.grammar
        calls = grammar if isinstance(grammar, ToolCalls) else None
        structure = None if grammar is None or calls is not None else body.structure()
        return ParsedRequest(
            kind="chat" if isinstance(body, ChatRequest) else "completion",
            choices=choices,
            stream=bool(body.stream),
            include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
            exit_config=exit_config,
            effort=effort,
            trail=options.trail,
            structured="tools" if calls is not None else None if structure is None else structure[0],
            calls=calls,
            only_prompt=body.max_tokens == 0,
        )

    def _check_sources(self, options: Sigma0Options) -> None:
        sources, settings = options.sources, self._settings
        for count, limit, what in (
            (len(sources), settings.max_sources, "texts"),
            (sum(map(len, sources)), settings.max_source_chars, "characters in all"),
        ):
            if count > limit:
                message = f"sigma0.sources: this server takes at most {limit} {what}, got {count}"
                raise ApiError(400, message, "sigma0.sources")

    def _exit(self, body: ChatRequest | CompletionRequest, options: Sigma0Options) -> tuple[ExitConfig, Effort | None]:
        if options.exit is not None:
            config = _or_400("sigma0.exit", lambda: self._service.model.resolve_exit_config(options.exit))
            _or_400("sigma0.exit", lambda: config.stops_at(self.total_loops))
            return config, None
        if body.reasoning_effort is not None:
            return exit_for(body.reasoning_effort, self.default_exit, self.total_loops), body.reasoning_effort
        return self.default_exit, None

    def _choices(
        self,
        body: ChatRequest | CompletionRequest,
        options: Sigma0Options,
        exit_config: ExitConfig,
        effort: Effort | None,
    ) -> list[Choice]:
        n = body.n or 1
        if n > self._settings.max_n:
            raise ApiError(400, f"n: this server writes at most {self._settings.max_n} choices, got {n}", "n")
        unit, routed = self._unit(options)
        if unit is not None and not routed and options.special_tokens:
            name = "sigma0.special_tokens"
            raise ApiError(400, f"{name}: a ladder reads them as text: leave it out, or leave sigma0.ladder out", name)
        echo = isinstance(body, CompletionRequest) and bool(body.echo)
        if echo and body.stream:
            raise ApiError(400, "echo: is sent in a whole answer: leave stream out", "echo", "not_in_a_stream")
        for name, is_set in (("echo", echo), ("ignore_eos", bool(body.ignore_eos))):
            if is_set and unit is not None and not routed:
                message = f"{name}: does not reach the rungs of a ladder: leave it out"
                raise ApiError(400, message, name, NOT_WITH_LADDER)
        sampling, grammar, tools = self._sampling(body), self._grammar(body), self._tools(body)
        if body.ignore_eos and (grammar is not None or tools is not None):
            message = "ignore_eos: an answer that follows a grammar ends where it does: leave ignore_eos out"
            raise ApiError(400, message, "ignore_eos", "not_with_a_grammar")
        if tools is not None and unit is not None and not routed:
            name = "sigma0.ladder"
            raise ApiError(400, f"{name}: its rungs know no tools: leave it out, or tools and their turns", name)
        if grammar is not None and unit is not None and not routed:
            name = "sigma0.ladder"
            message = f"{name}: its rungs follow no schema or grammar: leave one of both out"
            raise ApiError(400, message, name, NOT_WITH_LADDER)
        # each rung fills in the thresholds that it leaves open from its own checkpoint
        setting = None if options.exit is None else ExitConfig.parse(options.exit)
        choices = []
        for number, prompt in enumerate(self._prompts(body)):
            ids = self._ids(prompt, options.special_tokens, tools)
            # before a grammar is compiled, which a prompt that is too long for the context needs none of
            new = self._new_tokens(body, len(ids))
            if tools is not None and tools.style is not None:
                assert isinstance(body, ChatRequest)
                grammar = self._calls(body, tools.style, ids)
            prompt_text = str(self._service.tokenizer.decode(list(ids), skip_special_tokens=True))
            # a prompt of ids has no text for other tokenizers, and a ladder does not parse special tokens
            text = None if isinstance(prompt, tuple) or options.special_tokens else prompt
            for choice in range(n):
                request = EngineRequest(
                    prompt_ids=ids,
                    max_new_tokens=new,
                    exit_config=exit_config,
                    sampling=_seeded(sampling, choice),
                    stop=body.stops,
                    logprobs=body.num_logprobs,
                    prompt_logprobs=body.num_logprobs if echo else None,
                    ignore_eos=bool(body.ignore_eos),
                    context=(prompt_text, *options.sources),
                    whole=not body.stream,
                    cache_salt=body.cache_salt,
                    on_collapse=options.on_collapse or self._settings.on_collapse,
                    grammar=grammar,
                )
                task = None
                # a ladder gives no logprobs, follows no grammar, knows no tools, biases no logits and goes past no end:
                # a request for both is refused, and one for these alone is not routed
                alone = request.logprobs is not None or bool(sampling.logit_bias) or echo or request.ignore_eos
                alone = alone or grammar is not None or tools is not None
                if unit is not None and text is not None and not (routed and alone):
                    sources = tuple(options.sources)
                    from sigma0.serve.api.ladder import LadderTask

                    task = LadderTask(request, text, unit, setting, effort, options.limits, options.trail, sources)
                choices.append(Choice(number, request, task, routed, self._echoed(prompt, ids) if echo else None))
            self._check_ladder(unit, routed, choices[-1])
        return choices

    def _echoed(self, prompt: str | Messages | tuple[int, ...], ids: Sequence[int]) -> str:
        return prompt if isinstance(prompt, str) else str(self._service.tokenizer.decode(list(ids)))

    def _grammar(self, body: ChatRequest | CompletionRequest) -> Spec | None:
        """What the answer has to be, which is tried later."""
        try:
            structure = body.structure()
        except ValueError as error:
            raise ApiError(400, str(error), None, "invalid_grammar") from error
        return None if structure is None else structure[1]

    def _tools(self, body: ChatRequest | CompletionRequest) -> "_Tools | None":
        """The tools that are shown to the model; None where neither they nor turns of theirs are."""
        if not isinstance(body, ChatRequest):
            return None
        _or_400("messages", lambda: check_history(body.messages))
        shown, tokenizer = body.shown_tools, self._service.tokenizer
        if not shown:
            if not any(message.tool_calls or message.role == "tool" for message in body.messages):
                return None
            _or_400("messages", lambda: tool_template(tokenizer), "unsupported_parameter")
            return _Tools([], None)
        style = _or_400("tools", lambda: call_style(tokenizer, self._settings.tool_parser), "unsupported_parameter")
        return _Tools(shown, style)

    def _calls(self, body: ChatRequest, style: CallStyle, ids: Sequence[int]) -> ToolCalls:
        if body.structure() is not None:
            message = "tools: an answer that may call them follows no schema or grammar beside: leave one of both out"
            raise ApiError(400, message, "tools")
        thinks = str(self._service.tokenizer.decode(list(ids[-8:]))).rstrip().endswith("<think>")

        return _or_400("tools", lambda: body.calls(style, thinks), "invalid_grammar")

    def _unit(self, options: Sigma0Options) -> tuple[Any, bool]:
        """The unit that is handed up, and whether the engine answers first."""
        if options.ladder and self._ladder_runner is None:
            raise ApiError(400, NO_LADDER, "sigma0.ladder", "no_ladder")
        unit = None if self._ladder_runner is None else self._ladder_runner.unit_for(options.ladder or False)
        if unit is not None:
            if options.on_collapse is not None:
                message = "sigma0.on_collapse: does not reach the rungs of a ladder: leave it out"
                raise ApiError(400, message, "sigma0.on_collapse")
            return unit, False
        if self._ladder_runner is not None and switches().routing and options.ladder is not False:
            return "answer", True
        # an empty budget is one too
        for name, given in (("budget", options.budget is not None), ("trail", options.trail)):
            if given:
                raise ApiError(400, f"sigma0.{name}: needs sigma0.ladder", f"sigma0.{name}")
        return None, False

    def _check_ladder(self, unit: Any, routed: bool, choice: Choice) -> None:
        if self._ladder_runner is None or unit is None or routed:
            return
        if choice.task is None:
            raise ApiError(400, "prompt: a ladder takes texts, not ids", "prompt", NOT_WITH_LADDER)
        ladder, task = self._ladder_runner, choice.task
        _or_400("sigma0.ladder", lambda: ladder.check(task), NOT_WITH_LADDER)

    def _prompts(self, body: ChatRequest | CompletionRequest) -> Sequence[str | Messages | tuple[int, ...]]:
        if isinstance(body, ChatRequest):
            return [[message.to_dict() for message in body.messages]]
        prompts = body.prompts
        if len(prompts) > self._settings.max_prompts:
            message = f"prompt: this server takes at most {self._settings.max_prompts} at once, got {len(prompts)}"
            raise ApiError(400, message, "prompt")
        return prompts

    def _ids(
        self, prompt: str | Messages | tuple[int, ...], special_tokens: bool, tools: "_Tools | None" = None
    ) -> tuple[int, ...]:
        self._check_length(prompt)
        if isinstance(prompt, tuple):
            size = int(self._service.model.config.vocab_size)
            if max(prompt) >= size:
                raise ApiError(400, f"prompt: ids are under {size}, got {max(prompt)}", "prompt")
            ids = prompt
        else:
            param = "prompt" if isinstance(prompt, str) else "messages"
            shown = [] if tools is None else tools.shown
            template = {} if tools is None or tools.style is None else {"tool_call_format": _FORMATS[tools.style]}
            tokenizer = self._service.tokenizer
            ids = tuple(
                _or_400(param, lambda: encode(tokenizer, prompt, special_tokens, shown, **template)[0].tolist())
            )
            if not ids:
                raise ApiError(400, f"{param}: holds nothing that the model could read", param)
        limit = self._settings.max_prompt_tokens
        if limit is not None and len(ids) > limit:
            message = f"a prompt of {len(ids)} tokens is over this server's limit of {limit}"
            raise ApiError(400, message, code="context_length_exceeded")
        return ids

    def _check_length(self, prompt: str | Messages | tuple[int, ...]) -> None:
        """Refuses a prompt that can never fit, before the template and the tokenizer spend time on it."""
        least = len(prompt) if isinstance(prompt, tuple) else self._bound.tokens_of(prompt, self._most)
        if least <= self._most:
            return
        if isinstance(prompt, tuple):
            message = f"a prompt of {least} tokens is over this server's limit of {self._most}"
        else:
            message = (
                f"a prompt of at least {least} tokens is over this server's limit of {self._most}: a token is at most "
                f"{self._bound.longest} {self._bound.unit} long, so that no text of over "
                f"{self._most * (self._bound.longest or 0)} fits"
            )
        raise ApiError(400, message, code="context_length_exceeded")

    def _new_tokens(self, body: ChatRequest | CompletionRequest, prompt_tokens: int) -> int:
        limit = self._settings.max_new_tokens
        name = "max_completion_tokens" if body.max_completion_tokens else "max_tokens"
        requested = body.max_completion_tokens or body.max_tokens
        if requested is not None and requested > limit:
            raise ApiError(400, f"{name}: this server writes at most {limit} tokens, got {requested}", name)
        # the prompt is read with the pass that would write a token
        requested = 1 if body.max_tokens == 0 else requested
        left = max(1, min(limit, self.context - prompt_tokens))
        new = requested or (left if isinstance(body, ChatRequest) else min(left, COMPLETION_TOKENS))
        if prompt_tokens + new > self.context:
            fewer = f", or ask for fewer in {name}" if prompt_tokens < self.context else ""
            message = f"a prompt of {prompt_tokens} tokens and {new} new ones exceed the context of {self.context}"
            raise ApiError(
                400, f"{message}: shorten the prompt{fewer}", name if fewer else None, "context_length_exceeded"
            )
        return new

    def _biases(self, body: ChatRequest | CompletionRequest) -> tuple[tuple[int, float], ...]:
        biases = {int(token_id): bias for token_id, bias in (body.logit_bias or {}).items()}
        size = int(self._service.model.config.vocab_size)
        return _or_400("logit_bias", lambda: check_logit_bias(biases, size))

    def _sampling(self, body: ChatRequest | CompletionRequest) -> SamplingParams:
        """SamplingParams settings: the request's, else the checkpoint's, else none."""
        defaults = self._service.model.generation_config
        samples = bool(getattr(defaults, "do_sample", False))

        def setting(name: str, none: float, use_default: bool = samples) -> Any:
            requested = getattr(body, name)
            default = getattr(defaults, name, None) if use_default else None
            return requested if requested is not None else none if default is None else default

        return SamplingParams(
            temperature=setting("temperature", 1.0 if samples else 0.0),
            top_p=setting("top_p", 1.0),
            top_k=setting("top_k", 0),
            min_p=setting("min_p", 0.0),
            repetition_penalty=setting("repetition_penalty", 1.0, use_default=True),
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=self._biases(body),
            seed=body.seed,
        )


@dataclass(frozen=True)
class _Tools:
    """What the chat template shows of tools."""

    shown: list[dict[str, Any]]  # The tools
    style: CallStyle | None  # How calls are written; None where there may be none


# As Nanbeige's template calls them.
_FORMATS = {"hermes": "json", "nanbeige": "xml"}


def _seeded(sampling: SamplingParams, choice: int) -> SamplingParams:
    if sampling.seed is None:
        return sampling
    # no generator takes a negative seed everywhere, nor one of more than 63 bits
    return SamplingParams(**{**vars(sampling), "seed": (sampling.seed + choice) % 2**63})


def _or_400(param: str, make: Callable[[], T], code: str | None = None) -> T:
    """The result of a function, or a 400 that names a field where it raises a ValueError."""
    try:
        return make()
    except ValueError as error:
        raise ApiError(400, f"{param}: {error}", param, code) from error
