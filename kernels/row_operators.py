"""Functions in C++ as operators of torch, which a compiled graph calls without Python.

A call from Python takes 3 us, where one that hands over the memory of twenty tensors takes 12. The operators are
registered through torch's stable ABI, whose headers compile in a second.
"""

import ctypes
from functools import lru_cache
from typing import Any

import torch

from sigma0.kernels.cpp_library import ELEMENTS, can_compile, load_library
from sigma0.kernels.row_attention import compiled_attention

_SOURCES = "row_sums.cpp row_dot.cpp row_norm.cpp row_block.cpp row_operators.cpp"


@lru_cache
def has_operators() -> bool:
    """Whether they can be compiled; a warning says where they cannot."""
    return can_compile(lambda: ready_for_block(32), "operators in C++ could not be compiled, torch's own are taken")


@lru_cache
def ready_for_product(dtype: torch.dtype) -> None:
    """Compiles what `sigma0::row_dot` calls for rows of a dtype: float32 or bf16."""
    library = _library()
    if dtype is torch.bfloat16:
        texts = load_library("row_sums.cpp row_dot.cpp", {"ELEMENT": ELEMENTS[dtype], "BFLOAT16": 1})
        library.set_bfloat16_dot(_address(texts.row_dot))


@lru_cache
def ready_for_block(head_dim: int) -> None:
    """Compiles what `sigma0::run_block` calls for heads of so many numbers."""
    attention = compiled_attention(torch.float32, head_dim)
    _library().set_attention(ctypes.c_int64(head_dim), _address(attention))


def _address(function: Any) -> ctypes.c_void_p:
    return ctypes.cast(function, ctypes.c_void_p)


@lru_cache
def _library() -> Any:
    return load_library(_SOURCES, {"ELEMENT": "float", "BFLOAT16": 0})
