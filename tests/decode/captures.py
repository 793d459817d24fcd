"""Every way in which a step is called, on a CPU: eager, in plain torch, late, captured, compiled, by the host.

Captures are made without CUDA: a function that is called again in place of a replay, and held to what a graph could do.
"""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.generation import GenerationMixin

from sigma0.decode import compiled, runners
from sigma0.decode.compiled import Captured
from sigma0.decode.ops import TORCH, depth_attention_reference

WAYS = ("eager", "torch", "late", "captured", "compile", "python", "stock")


@contextmanager
def called_by(way, model, capture=None):
    """Has steps called in one of `WAYS`; yields what `generate` is to be asked for, and the captures that are made."""
    capture = capture or RepeatedCapture
    made, asked = [], {"runner": {"captured": "cudagraph", "compile": "compile"}.get(way, "eager")}
    with pytest.MonkeyPatch.context() as patch:
        if way == "torch":
            patch.setattr(model, "backend", "torch")
        if way in ("late", "captured"):
            # attention whose calls depend on no value, as a kernel on a device
            ops = replace(TORCH, depth_attention=depth_attention_reference)
            patch.setattr(type(model), "operations", property(lambda self: ops))
            patch.setattr(runners, "ASYNC_DEVICES", frozenset({"cpu"}))
        if way == "captured":
            patch.setattr(runners, "CAPTURES", {"cpu": lambda device: made.append(capture(device)) or made[-1]})
            patch.setattr(runners, "_SHORTEST", 64)
        if way == "compile":
            # the graph is run as it was traced: no code is generated, which takes seconds
            patch.setattr(compiled, "generate_code", lambda graph, examples: graph)
            # layers that no function in C++ knows
            patch.setattr(type(model), "plain_block", lambda *given: None)
        if way == "python":
            asked["logits_processor"] = [lambda ids, scores: scores]
        if way == "stock":
            patch.setattr(type(model), "_sample", GenerationMixin._sample)
        yield asked, made


class Outside(TorchDispatchMode):
    """Collects the memory that a function works on and has not made itself, and what it calls.

    Attributes:
        memory: Addresses, and which call met each first.
        calls: Names, in their order.
        devices: Types of the devices of all tensors that operations are given; of one number may be anywhere.
    """

    def __init__(self):
        super().__init__()
        self.memory: dict[int, str] = {}
        self.calls: list[str] = []
        self.devices: set[str] = set()
        self._own: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [leaf for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, torch.Tensor)]
        storages = [tensor.untyped_storage() for tensor in given]
        for storage in storages:
            if func is torch.ops.aten.lift_fresh.default:
                self._own[storage.data_ptr()] = storage
            if storage.data_ptr() not in self._own:
                self.memory.setdefault(storage.data_ptr(), str(func))
        self.devices |= {tensor.device.type for tensor in given if tensor.dim()}
        results = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(results):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage.data_ptr() not in self.memory:
                    # kept, so that nothing else comes to lie there
                    self._own[storage.data_ptr()] = storage
        self.calls.append(str(func))
        return results


class RepeatedCapture:
    """Calls a function again, and asserts that it does what it did when it was captured, to the same memory.

    Attributes:
        captures: Functions that were captured.
        replays: Calls.
        sees_memory: Whether the memory is compared.
    """

    def __init__(self, device):
        self.captures = self.replays = 0
        # what a compiled program takes for itself is not seen
        self.sees_memory = True

    def __call__(self, function):
        self.captures += 1
        # what is made at the first call is there at the second
        function()
        with Outside() as captured:
            outputs = function()

        def replay():
            self.replays += 1
            with Outside() as again:
                results = function()
            assert again.calls == captured.calls
            assert again.memory == captured.memory or not self.sees_memory
            for kept, new in zip(outputs, results, strict=True):
                kept.copy_(new)

        return Captured(replay, outputs)
