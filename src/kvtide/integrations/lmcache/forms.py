"""What LMCache's keys and memory objects are here: 32 bytes, and a kind of chunks. Pure. Next: names.

LMCache's key names model, rank, object group, salt and content, but neither dtype nor shape of the object. Those make
its form, and each form has a store of its own: bytes of another form are never handed out.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from lmcache.v1.distributed.api import ObjectKey

from kvtide.blocks import KEY, KeyArray
from kvtide.chunks.several import Kind

_TEXT_MAX = 160  # of a fact; longer ones are told by their hash


def text_of(key: ObjectKey) -> str:
    """Return everything a key consists of, as JSON. Keys differ in their content: the rest is written once."""
    return f'["{key.chunk_hash.hex()}", {_rest(key.model_name, key.kv_rank, key.object_group_id, key.cache_salt)}]'


@functools.lru_cache(1024)
def _rest(*values: Any) -> str:
    return json.dumps(values)[1:-1]


def from_told(values: list[Any]) -> ObjectKey:
    """Return the key whose `text_of` holds these values.

    Raises: ValueError, TypeError if they are not those of a key.
    """
    content, model, rank, group, salt = values
    if not (isinstance(model, str) and isinstance(rank, int) and isinstance(group, int) and isinstance(salt, str)):
        raise TypeError(f"not a key: {values!r}"[:200])
    return ObjectKey(bytes.fromhex(content), model, rank, group, salt)


def keys_of(keys: Sequence[ObjectKey]) -> KeyArray:
    """Return one key of ours for each of `keys`, the same in every process. Shapes: returns [n]."""
    parts = [hashlib.sha256(text_of(key).encode()).digest() for key in keys]
    return np.frombuffer(b"".join(parts), KEY)


def form_of(memory: Any) -> Kind:
    """Return the form of a `MemoryObj`: its dtypes, shapes and format, and the bytes these take."""
    try:
        shapes, dtypes = memory.get_shapes(), memory.get_dtypes()
    except AssertionError:  # LMCache's way to say that it knows one only
        shapes, dtypes = [memory.get_shape()], [memory.get_dtype()]
    return _form(tuple(shapes), tuple(dtypes), memory.get_memory_format())


@functools.lru_cache(1024)
def _form(shapes: tuple[Any, ...], dtypes: tuple[Any, ...], memory_format: Any) -> Kind:
    num_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
    parts = [f"{dtype} {'x'.join(map(str, shape))}" for shape, dtype in zip(shapes, dtypes, strict=True)]
    text = f"{', '.join(parts)}; {getattr(memory_format, 'name', '')}"
    if len(text) > _TEXT_MAX:
        text = f"{text[: _TEXT_MAX - 66]}; {hashlib.sha256(text.encode()).hexdigest()}"
    return Kind(text, (num_bytes,))
