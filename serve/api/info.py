"""What the server says of itself: models, the looped one's settings, health, metrics, and the page."""

from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter, Response
from fastapi.responses import HTMLResponse
from pydantic import BaseModel

from sigma0.checkpoints.about import read_about
from sigma0.config import SHARES, exit_for
from sigma0.serve.api.errors import ApiError, ErrorBody, unavailable
from sigma0.serve.api.handlers import RequestHandler
from sigma0.serve.api.ladder import LadderRunner
from sigma0.serve.api.metrics import CONTENT_TYPE, Metrics
from sigma0.serve.api.requests import RequestParser
from sigma0.serve.engine.messages import Service

PAGE = Path(__file__).parents[1] / "page"
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
}


class ModelInfo(BaseModel):
    """A model, as OpenAI tells it.

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
    """All models of the server: one.

    Attributes:
        object: Always `list`.
        data: The models.
    """

    object: Literal["list"] = "list"
    data: list[ModelInfo]


class Sigma0Info(BaseModel):
    """The served model as a looped one.

    Attributes:
        model: Its name.
        total_loops: T.
        exit: Its own exit setting.
        efforts: The exit setting of each `reasoning_effort`.
        ladder: Names of the ladder's rungs, the lowest first; None where there is no ladder.
        context: Tokens that prompt and answer may have together.
        knows: What the model knows, so that "NAME knows ..." is a sentence; None where its checkpoint does not say.
        examples: Prompts that the model answers, if its checkpoint names any.
    """

    model: str
    total_loops: int
    exit: dict[str, Any]
    efforts: dict[str, dict[str, Any]]
    ladder: list[str] | None
    context: int
    knows: str | None
    examples: list[str]


class Health(BaseModel):
    """Whether the server takes requests.

    Attributes:
        status: `ok`.
    """

    status: Literal["ok"] = "ok"


def told(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The failures of a route, for the API's description."""
    return {status: {"model": ErrorBody} for status in statuses}


def information(
    service: Service,
    planner: RequestParser,
    laddering: LadderRunner | None,
    metrics: Metrics,
    answerer: RequestHandler,
    created: int,
) -> APIRouter:
    """The routes that only tell.

    Args:
        service: The engine.
        planner: Knows the model's settings.
        laddering: The server's ladder, if it has one.
        metrics: What Prometheus reads.
        answerer: Knows whether the server is being shut down.
        created: When the server was started, seconds since 1970.
    """
    router = APIRouter()
    model = ModelInfo(id=service.name, created=created)
    about = read_about(service.model.name_or_path) if service.model.name_or_path else None

    @router.get("/v1/models", responses=told(401, 413))
    async def models() -> ModelList:
        """All models."""
        return ModelList(data=[model])

    # ids of the hub hold a slash
    @router.get("/v1/models/{name:path}", responses=told(401, 404, 413))
    async def model_of(name: str) -> ModelInfo:
        """One model."""
        if name != model.id:
            raise ApiError(404, f"the model {name[:80]!r} does not exist", "model", "model_not_found")
        return model

    @router.get("/v1/sigma0", responses=told(401, 413))
    async def sigma0() -> Sigma0Info:
        """The served model as a looped one."""
        return Sigma0Info(
            model=service.name,
            total_loops=planner.total_loops,
            exit=planner.own.to_dict(),
            efforts={effort: exit_for(effort, planner.own, planner.total_loops).to_dict() for effort in SHARES},
            ladder=None if laddering is None else list(laddering.names),
            context=planner.context,
            knows=None if about is None else about.knows,
            examples=[] if about is None else [example.prompt for example in about.examples],
        )

    @router.get("/health", responses=told(413, 503))
    async def health() -> Health:
        """Whether the server takes requests."""
        if answerer.draining:
            raise unavailable("the server is being shut down", "shutting_down")
        if not service.is_up:
            raise unavailable("no engine is up", "unavailable")
        return Health()

    # balancers ask so, and FastAPI offers no HEAD of its own
    router.add_api_route("/health", health, methods=["HEAD"], include_in_schema=False)

    @router.get("/metrics", responses={**told(401, 413), 200: {"content": {"text/plain": {}}}})
    async def prometheus() -> Response:
        """What Prometheus reads."""
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    @router.get("/", include_in_schema=False)
    async def page() -> Response:
        """The page; its scripts and styles lie under `/page`."""
        return HTMLResponse((PAGE / "index.html").read_bytes(), headers=PAGE_HEADERS)

    return router
