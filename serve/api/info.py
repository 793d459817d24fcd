"""Info routes: models, settings of the looped model, health, metrics, and the page."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fastapi import APIRouter, Response
from fastapi.responses import HTMLResponse
from pydantic import BaseModel

from sigma0.checkpoints.about import read_about
from sigma0.config import SHARES, exit_for
from sigma0.serve.api.errors import ApiError, ErrorBody, as_api_error, unavailable
from sigma0.serve.api.handlers import RequestHandler
from sigma0.serve.api.metrics import CONTENT_TYPE, Metrics
from sigma0.serve.api.requests import RequestParser
from sigma0.serve.engine.messages import RequestCutOff, Service, SlotView, Unavailable

if TYPE_CHECKING:
    from sigma0.serve.api.ladder import LadderRunner

PAGE = Path(__file__).parents[1] / "page"
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
}


class ModelInfo(BaseModel):
    """A model in OpenAI's shape.

    Attributes:
        id: Its name.
        object: Always `model`.
        created: When the server was started, seconds since 1970.
        owned_by: Always `sigma0`.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "sigma0"


class ModelList(BaseModel):
    """The models of the server: one.

    Attributes:
        object: Always `list`.
        data: The models.
    """

    object: Literal["list"] = "list"
    data: list[ModelInfo]


class Calibration(BaseModel):
    """What the confidence of a verdict was calibrated on.

    Attributes:
        answers: On how many answers.
        auroc: Chance that a wrong answer gets less confidence than a right one; None where it is not known.
        calibration_error: Mean difference of confidence and share of right answers.
    """

    answers: int
    auroc: float | None
    calibration_error: float


class Sigma0Info(BaseModel):
    """The served model as a looped one.

    Attributes:
        model: Its name.
        total_loops: T.
        exit: Its own exit setting.
        efforts: The exit setting of each `reasoning_effort`.
        ladder: Names of the ladder's rungs, the lowest first; None where there is no ladder.
        context: Most tokens of prompt and answer together.
        knows: What the model knows, so that "NAME knows ..." is a sentence; None where its checkpoint does not say.
        examples: Prompts that the model answers, if its checkpoint names any.
        confidence: What its confidence was calibrated on; None where that is the score exp(-mean entropy).
    """

    model: str
    total_loops: int
    exit: dict[str, Any]
    efforts: dict[str, dict[str, Any]]
    ladder: list[str] | None
    context: int
    knows: str | None
    examples: list[str]
    confidence: Calibration | None


class Health(BaseModel):
    """Whether the server takes requests.

    Attributes:
        status: `ok`.
    """

    status: Literal["ok"] = "ok"


def failure_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The failures of a route, for `/openapi.json`."""
    return {status: {"model": ErrorBody} for status in statuses}


def info_router(
    service: Service,
    parser: RequestParser,
    ladder_runner: "LadderRunner | None",
    metrics: Metrics,
    handler: RequestHandler,
    created: int,
) -> APIRouter:
    """The routes that only read.

    Args:
        service: The engine.
        parser: Has the default exit setting and the limits.
        ladder_runner: The server's ladder, if it has one.
        metrics: Of the server.
        handler: Has the state of the shutdown.
        created: When the server was started, seconds since 1970.
    """
    router = APIRouter()
    model = ModelInfo(id=service.name, created=created)
    about = read_about(service.model.name_or_path) if service.model.name_or_path else None
    fitted = service.model.confidence_model
    calibration = None
    if fitted is not None:
        calibration = Calibration(
            answers=fitted.answers, auroc=fitted.auroc, calibration_error=fitted.calibration_error
        )

    @router.get("/v1/models", responses=failure_responses(401, 413))
    async def models() -> ModelList:
        """All models."""
        return ModelList(data=[model])

    # hub ids hold a slash
    @router.get("/v1/models/{name:path}", responses=failure_responses(401, 404, 413))
    async def model_of(name: str) -> ModelInfo:
        """One model."""
        if name != model.id:
            raise ApiError(404, f"the model {name[:80]!r} does not exist", "model", "model_not_found")
        return model

    @router.get("/v1/sigma0", responses=failure_responses(401, 413))
    async def sigma0() -> Sigma0Info:
        """The served model as a looped one."""
        return Sigma0Info(
            model=service.name,
            total_loops=parser.total_loops,
            exit=parser.default_exit.to_dict(),
            efforts={effort: exit_for(effort, parser.default_exit, parser.total_loops).to_dict() for effort in SHARES},
            ladder=None if ladder_runner is None else list(ladder_runner.names),
            context=parser.context,
            knows=None if about is None else about.knows,
            examples=[] if about is None else [example.prompt for example in about.examples],
            confidence=calibration,
        )

    @router.get("/health", responses=failure_responses(413, 503))
    async def health() -> Health:
        """Whether the server takes requests."""
        if handler.draining:
            raise unavailable("the server is being shut down", "shutting_down")
        if not service.is_up:
            raise unavailable("no engine is up", "unavailable")
        return Health()

    # load balancers send HEAD, which FastAPI does not add to a GET
    router.add_api_route("/health", health, methods=["HEAD"], include_in_schema=False)

    @router.get("/metrics", responses={**failure_responses(401, 413), 200: {"content": {"text/plain": {}}}})
    async def prometheus() -> Response:
        """Metrics for Prometheus."""
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    @router.get("/slots", responses=failure_responses(401, 413, 503, 504))
    async def slots() -> list[SlotView]:
        """The requests in the engine, running and waiting, without their texts."""
        try:
            return list(await service.slots())
        except (Unavailable, RequestCutOff, TimeoutError, asyncio.TimeoutError) as error:
            raise as_api_error(error, "") from error

    @router.get("/", include_in_schema=False)
    async def page() -> Response:
        """The page; its scripts and styles lie under `/page`."""
        return HTMLResponse((PAGE / "index.html").read_bytes(), headers=PAGE_HEADERS)

    return router
