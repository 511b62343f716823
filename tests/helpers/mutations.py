"""Mutations of files, for the fuzzer: of bytes as accidents and strangers change them, of JSON along its structure."""

from __future__ import annotations

import json
import random
from typing import Any

DEEP, TWICE = "@deep@", "@twice@"  # stand for what `json.dumps` cannot write
NUMBERS = (0, -1, 1, 2, 0.5, -0.0, 1e308, -1e308, 5e-324, 1e-9, 2**31, 2**53, 2**53 + 1, 2**63, -(2**63), 10**400)
NUMBERS += (float("nan"), float("inf"), 10**7, 10**9)
TEXTS = ("", ".", "..", "../../victim", "x/../../victim/model", "/etc/passwd", "..\\victim", "a\0b", "\ud800", "dense")
TEXTS += (
    "\x1b[31mred\x1b[0m\r\n",
    "x" * 20_000,
    "<script>alert(1)</script>",
    "-x",
    "model.onnx",
    "NaN",
    "\u202e",
    "é" * 300,
)
OTHERS = (None, None, True, False, [], [], {}, {}, [[]], [0] * 20_000, {"": ""}, {"x": DEEP})


def mutated_json(text: str, rng: random.Random, times: int | None = None) -> bytes:
    """JSON with some of its values replaced, deleted, doubled or moved; rarely, with bytes changed instead."""
    if rng.random() < 0.1:
        return mutated_bytes(text.encode(), rng)
    tree = json.loads(text)
    for _ in range(times or rng.choice((1, 1, 1, 2, 3))):
        tree = _changed(tree, rng)
    deep, written = rng.choice((70, 900, 5000)), json.dumps(tree)
    written = written.replace(f'"{DEEP}"', "[" * deep + "]" * deep)
    return _with_keys_twice(written, rng).encode()


def _with_keys_twice(written: str, rng: random.Random) -> str:
    """A marked key becomes the one that follows it."""
    while (at := written.find(f'"{TWICE}": 0, ')) >= 0:
        rest = written[at + len(f'"{TWICE}": 0, ') :]
        key = rest[: rest.find('"', 1) + 1] if rest.startswith('"') else '"x"'
        written = f"{written[:at]}{key}: {rng.choice(('0', 'null', '[]'))}, {rest}"
    return written


def _changed(tree: Any, rng: random.Random) -> Any:
    places = list(_places(tree))
    if not places:
        return rng.choice(OTHERS)
    holder, key = rng.choice(places)
    kind = rng.randrange(10)
    value = holder[key]
    if kind == 0:
        del holder[key]
    elif kind >= 8:  # what stays of the same kind gets past the first checks
        alike = [other[at] for other, at in places if type(other[at]) is type(value)]
        if isinstance(value, str) and rng.random() < 0.5:
            _rename(tree, value, rng.choice((*TEXTS, *alike)))
        else:
            holder[key] = json.loads(json.dumps(rng.choice(alike)))
    elif kind == 1 and isinstance(value, (int, float)) and not isinstance(value, bool):
        holder[key] = value * rng.choice((-1, 0, 2, 10, 1e-9, 1e9, 1.001))
    elif kind == 2 and isinstance(value, str):
        holder[key] = rng.choice(TEXTS)
    elif kind == 3 and isinstance(value, list):
        holder[key] = rng.choice((value * 2, value[:-1], value[1:], value[::-1], value[:1], [*value, None]))
    elif kind == 4:
        other, at = rng.choice(places)
        holder[key] = json.loads(json.dumps(other[at]))  # a copy, so that nothing holds itself
    elif kind == 5 and isinstance(holder, dict):
        marked = {TWICE: 0, **holder} if rng.random() < 0.5 else {**holder, rng.choice(TEXTS): value}
        holder.clear()
        holder.update(marked)
    else:
        alike = NUMBERS if isinstance(value, (int, float)) else TEXTS if isinstance(value, str) else OTHERS
        holder[key] = rng.choice(alike if rng.random() < 0.7 else rng.choice((NUMBERS, TEXTS, OTHERS)))
    return tree


def _rename(tree: Any, old: str, new: str) -> None:
    """Replace a text everywhere, as a name that several places know."""
    for holder, key in _places(tree):
        if holder[key] == old:
            holder[key] = new
        if isinstance(holder, dict) and key == old:
            holder[new] = holder.pop(old)


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Every value of a tree by its holder and its key; of long lists of numbers only the ends, or they would be all."""
    found, waiting = [], [tree]
    while waiting:
        holder = waiting.pop()
        keys: Any = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        if isinstance(holder, list) and len(holder) > 8:
            keys = (0, 1, len(holder) // 2, len(holder) - 1)
        found += [(holder, key) for key in keys]
        waiting += [holder[key] for key in keys]
    return found


def mutated_graph(data: bytes, rng: random.Random) -> bytes:
    """An ONNX file with another name, size, type, operator, place of weights or description somewhere."""
    import onnx

    model = onnx.load_model_from_string(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        node, tensor = rng.choice(model.graph.node), rng.choice(model.graph.initializer)
        port = rng.choice([*model.graph.input, *model.graph.output])
        kind = rng.randrange(12)
        if kind == 0:
            node.output[0] = rng.choice([*TEXTS[:-6], "blocks.9999.merge.order", "blocks.x.merge.order"]).encode(
                "utf-8", "replace"
            )
        elif kind == 1:
            node.op_type = rng.choice(["Attention", "Nothing", "", "If", "DynamicQuantizeLinear"])
        elif kind == 2 and tensor.dims:
            tensor.dims[0] = rng.choice([-1, 0, 1, 2**40, 2**62, tensor.dims[0] + 1])
        elif kind == 3:
            tensor.data_type = rng.choice([0, 1, 7, 8, 16, 23, 99])
        elif kind == 4 and tensor.external_data:
            entry = rng.choice(tensor.external_data)
            entry.value = rng.choice(["../victim", "/etc/passwd", "", "-1", "0", "x", "9" * 30, "dense.onnx"])
        elif kind == 5 and tensor.external_data:
            del tensor.external_data[rng.randrange(len(tensor.external_data))]
        elif kind == 6 and model.metadata_props:
            entry = rng.choice(model.metadata_props)
            is_json = entry.value[:1] in ("{", "[")
            changed = mutated_json(entry.value, rng) if is_json else rng.choice(TEXTS).encode("utf-8", "replace")
            entry.value = changed.decode("utf-8", "replace")
        elif kind == 7:
            port.type.tensor_type.elem_type = rng.choice([0, 1, 2, 8, 99])
        elif kind == 8 and port.type.tensor_type.shape.dim:
            rng.choice(port.type.tensor_type.shape.dim).dim_value = rng.choice([-1, 0, 1, 2**40])
        elif kind == 9:
            del model.graph.input[:]
        elif kind == 10:
            tensor.name = rng.choice(["", "head.weight", "x" * 1000])
        else:
            model.opset_import[0].version = rng.choice([-1, 0, 7, 99, 2**40])
    return model.SerializeToString()


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    """Bytes with bits flipped, pieces cut out, doubled, overwritten or added, or cut off."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        if not changed:
            return b""
        at, length = _place(len(changed), rng), rng.choice((1, 2, 4, 8, 64))
        kind = rng.randrange(7)
        if kind <= 1:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            changed[at : at + length] = bytes(rng.choice((0, 255, rng.randrange(256))) for _ in range(length))
        elif kind == 3:
            del changed[at : at + length]
        elif kind == 4:
            changed[at:at] = changed[at : at + length]
        elif kind == 5:
            changed[at:at] = rng.randbytes(length)
        elif rng.random() < 0.3:
            del changed[at:]
    return bytes(changed)


def _place(size: int, rng: random.Random) -> int:
    """A place in a file, most often at its beginning or its end, where headers and indices are."""
    near = min(size, 400)
    return rng.choice((rng.randrange(size), rng.randrange(near), size - 1 - rng.randrange(near)))
