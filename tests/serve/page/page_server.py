"""A server that serves the page and streams canned chunks, each as soon as it is released."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[3] / "serve" / "page"
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
EXIT = {"mode": "qexit", "q": 0.5, "after_exit": "finish"}
ABOUT = {
    "model": "pocket",
    "total_loops": 4,
    "exit": EXIT,
    "efforts": {"minimal": EXIT | {"q": 0.2}, "low": EXIT | {"q": 0.35}, "medium": EXIT, "high": EXIT | {"q": 0.8}},
    "ladder": None,
    "context": 512,
    "knows": None,
    "examples": [],
    "confidence": None,
}
VERDICT = {
    "converged": True,
    "depth": 2.0,
    "proximity": 0.3,
    "grounded": None,
    "stable": "contract",
    "reason": "threshold_met",
    "confidence": 0.95,
}
WAIT_SECONDS = 30


def token(text: str, depth: int, **fields: Any) -> dict[str, Any]:
    known = {"reason": "threshold_met", "fate": "contract", "proximity": 0.1, "margin": 0.8, "entropy": 0.4}
    return {"id": 1, "text": text, "depth": depth, "rung": "pocket", "handed_up": None} | known | fields


def chunk(output: dict[str, Any], content: str = "", finish: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": content} if content else {}, "finish_reason": finish}
    sigma = {"exit": EXIT, "total_loops": 4, "reasoning_effort": None, "choices": [{"index": 0} | output]}
    return {"object": "chat.completion.chunk", "model": "pocket", "choices": [choice], "sigma0": sigma}


def answer(tokens: list[dict[str, Any]], door: str = "converge", why: str = "all is well.") -> list[dict[str, Any]]:
    """The chunks of a whole answer: one for each token, the end, and the usage."""
    chunks = []
    for count, item in enumerate(tokens, 1):
        passes = {"passes": sum(token["depth"] for token in tokens[:count]), "full_passes": 4 * count}
        chunks.append(chunk({"tokens": [item]} | passes, item["text"]))
    end = {
        "tokens": [],
        "depths": [item["depth"] for item in tokens],
        "fates": [item["fate"] for item in tokens],
        "deepest_surprises": [0.25] * len(tokens),
        "deepest_agrees": [True] * len(tokens),
    }
    end |= {"mean_depth": 2.0, "depth_saved": 0.5, "passes_saved": 0.4, "rows_saved": 0.0}
    end |= {"passes": 7, "full_passes": 4 * len(tokens), "rows": 16}
    end |= {"door": door, "door_text": f"{door}: {why}", "verdict": VERDICT}
    usage = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": len(tokens)}, "sigma0": {"choices": []}}
    return [*chunks, chunk(end, finish="stop"), usage]


class PageServer(ThreadingHTTPServer):
    """On a port of its own; chunks of its answers go out as they are released."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        # what `GET /v1/sigma0` tells
        self.about: dict[str, Any] = dict(ABOUT)
        # chunks of the answers to come, the first to the next request; a chunk may be any JSON value
        self.answers: list[list[Any]] = []
        # status and body in place of the next answers
        self.refusal: tuple[int, dict[str, Any]] | None = None
        # that requests must bring; "" for none
        self.key = ""
        # bodies of the requests so far
        self.asked: list[dict[str, Any]] = []
        # set when a client has left in the middle of an answer
        self.hung_up = threading.Event()
        self.released = threading.Semaphore(0)
        # lets so many chunks go out
        self.release = self.released.release
        self.url = f"http://127.0.0.1:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    server: PageServer

    def do_GET(self) -> None:
        if self.path == "/v1/sigma0":
            if self._may():
                self._json(200, self.server.about)
            return
        path = PAGE / "index.html" if self.path == "/" else PAGE / self.path.removeprefix("/page/")
        if path.parent != PAGE or not path.is_file():
            self._json(404, {"error": {"message": f"no {self.path}"}})
            return
        self._head(200, f"{TYPES[path.suffix]}; charset=utf-8")
        self.wfile.write(path.read_bytes())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._may():
            return
        self.server.asked.append(body)
        if self.server.refusal:
            self._json(*self.server.refusal)
            return
        self._head(200, "text/event-stream")
        try:
            for item in self.server.answers.pop(0):
                assert self.server.released.acquire(timeout=WAIT_SECONDS)
                self._event(json.dumps(item, ensure_ascii=False))
            self._event("[DONE]")
        except OSError:
            self.server.hung_up.set()

    def _event(self, data: str) -> None:
        # in two pieces, cut within the line
        line = f"data: {data}\r\n\r\n".encode()
        for piece in (line[: len(line) // 2], line[len(line) // 2 :]):
            self.wfile.write(piece)
            self.wfile.flush()

    def _may(self) -> bool:
        if not self.server.key or self.headers.get("Authorization") == f"Bearer {self.server.key}":
            return True
        self._json(401, {"error": {"message": "no valid API key", "code": "invalid_api_key"}})
        return False

    def _json(self, status: int, value: dict[str, Any]) -> None:
        self._head(status, "application/json")
        self.wfile.write(json.dumps(value).encode())

    def _head(self, status: int, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Security-Policy", POLICY)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


STORY = [
    token("Yes", 1, margin=0.9),
    token(", Anna", 4, reason="max_depth", margin=0.2, proximity=0.3),
    token(" sleeps", 2, margin=0.6, proximity=0.2),
    token(".\n", 1, margin=0.95),
]


def ask(page, question="Does Anna sleep?"):
    page.get_by_role("textbox", name="Question").fill(question)
    page.get_by_role("button", name="Send").click()


def background(locator):
    return locator.evaluate("it => getComputedStyle(it).backgroundColor")
