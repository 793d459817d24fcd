"""A server of OpenAI's chat protocol, one behaviour for each model name: a process of its own for the tests.

python misbehaving_server.py    prints its port, serves on 127.0.0.1 until it is killed
"""

import json
import sys
import threading
import time
import zlib
from gzip import GzipFile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

USED = {
    "zero-usage": (0, 0),
    "true-usage": (True, True),
    "thinks": (0, 0),
}
EVENTS = {"Content-Type": "text/event-stream"}
# what is sent at once: a status, a body, and headers
SENT = {
    "fails": (500, b'{"error": {"message": "out of order"}}'),
    "garbage": (200, b"<html>data: no json {{{</html>", EVENTS),
    "nonsense": (200, b'data: {"choices": 7, "usage": "many"}\n\ndata: {"x": [}\n\n', EVENTS),
    "redirects": (307, b"", {"Location": "/v1/chat/completions"}),
    "other-packing": (200, b"data: {}\n\n", {**EVENTS, "Content-Encoding": "br"}),
}
ANSWER = "Paris is the capital of France."
seen = {}
lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        with lock:
            body = json.dumps(seen).encode()
        self.send(200, body)

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = request["model"]
        with lock:
            seen.setdefault(name, []).append(request)
        if name in SENT:
            self.send(*SENT[name])
        elif name == "refuses":
            key = self.headers["Authorization"]
            self.send(401, json.dumps({"error": {"message": f"bad key {key}"}}).encode())
        elif name == "hangs":
            time.sleep(60)
        elif name == "slow-headers":
            for part in (b"HTTP/1.1 200 OK\r\n", *[b"X-Wait: 1\r\n"] * 300):
                self.dribble(part)
        elif name.startswith("endless"):
            self.endless(name)
        else:
            self.stream(name, request)

    def endless(self, name):
        """All that a client takes, as fast as it takes it."""
        part = {"endless-event": b"data: 1\n", "endless-comments": b": still here\n\n"}.get(name, b"data: x") * 2**13
        packer = zlib.compressobj(wbits=31) if name == "endless-gzip" else None
        if packer is not None:
            part = bytes(2**24)
        self.begin(name, 500 if name == "endless-error" else 200)
        while True:
            self.write(part if packer is None else packer.compress(part))

    def write(self, part):
        try:
            self.wfile.write(part)
            self.wfile.flush()
        except (BrokenPipeError, ConnectionResetError):
            # nobody reads on
            sys.exit()

    def dribble(self, part):
        """Something now and then, so that no single read is late."""
        time.sleep(0.2)
        self.write(part)

    def send(self, status, body, headers=None):
        self.head(status, {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})})
        self.wfile.write(body)

    def head(self, status, headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def begin(self, name, status=200):
        """The headers of a stream."""
        packed = {"Content-Encoding": "gzip"} if name.endswith("gzip") else {}
        self.head(status, {**EVENTS, "Connection": "close", **packed})

    def stream(self, name, request):
        self.begin(name)
        if name == "gzip":
            self.wfile = GzipFile(fileobj=self.wfile, mode="wb")
        if name == "thinks":
            self.chunk({"content": None, "reasoning_content": "hm, " * 28})
        if name == "deep":
            self.wfile.write(b"data: " + b"[" * 100_000 + b"\n\n")
            return
        if name == "comments":
            for _ in range(300):
                self.dribble(b": still here\n\n")
        said = {"long": ["x" * 1000] * 10_000, "echo": [str(request["messages"][-1]["content"])]}
        for place, word in enumerate(said.get(name, ANSWER.split())):
            if name == "cut" and place == 3:
                return
            if name == "stalls" and place == 3:
                time.sleep(60)
            if name == "dribbles":
                time.sleep(0.4)
            self.chunk({"content": word if name == "long" or place == 0 else f" {word}"})
        self.chunk({}, {"length": "length", "breaks": {"code": 7}}.get(name, "stop"))
        if name == "stays-open":
            time.sleep(60)
        if name == "infinite-usage":
            self.wfile.write(b'data: {"choices": [], "usage": {"prompt_tokens": 1e400, "completion_tokens": 2}}\n\n')
            return
        used = zip(("prompt_tokens", "completion_tokens"), USED.get(name, (11, 7)), strict=True)
        self.event({"choices": [], "usage": dict(used)})
        self.wfile.write(b"data: [DONE]\n\n")
        if name == "gzip":
            self.wfile.close()

    def chunk(self, delta, finish=None):
        self.event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

    def event(self, value):
        base = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        self.write(b"data: " + json.dumps({**base, **value}).encode() + b"\n\n")

    def log_message(self, *args):
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    server.serve_forever()
