"""Changes of the weights of a Hugging Face folder: headers, tensors, shards and their index, by name."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from diptych.plans.families.folder import SINGLE
from tests.fuzz.grammars._file_contents import ODD
from tests.fuzz.grammars._folder_changes import FIRST, SECOND, Draft, pick, tensor_at

BYTES_OF = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
NAMES = {
    "newline": "model.a\nb",
    "long": "x" * 10**6,
    "surrogate": "model.\ud800",
    "empty": "",
    "path": "../../x",
    "markup": "model.[red]x[/blue]",
}
"""Odd names of tensors."""
SHAPES: dict[str, Callable[[list[int]], Any]] = {
    "transposed": lambda x: x[::-1],
    "flat": lambda x: [int(np.prod(x))],
    "with 1": lambda x: [1, *x],
    "larger": lambda x: [x[0] + 1, *x[1:]],
    "scalar": lambda x: [],
    "text": str,
    "object": lambda x: {},
    "empty text": lambda x: "",
    "null": lambda x: None,
    "floats": lambda x: [float(n) for n in x],
    "booleans": lambda x: [True] * len(x),
    "negative": lambda x: [-n for n in x],
    "0 and huge": lambda x: [0, 2**70],
    "huge": lambda x: [2**62] * 4,
}
OFFSETS: dict[str, Callable[[int, int, int], Any]] = {
    "shifted": lambda begin, end, size: [begin + 8, end + 8],
    "of the first": lambda begin, end, size: [0, end - begin],
    "negative": lambda begin, end, size: [begin - size, end - size],
    "beyond": lambda begin, end, size: [size, size + end - begin],
    "reversed": lambda begin, end, size: [end, begin],
    "floats": lambda begin, end, size: [float(begin), float(end)],
    "three": lambda begin, end, size: [begin, end, end],
    "huge": lambda begin, end, size: [begin + 2**70, end + 2**70],
    "text": lambda begin, end, size: "01",
    "object": lambda begin, end, size: {"0": begin, "1": end},
    "null": lambda begin, end, size: None,
    "booleans": lambda begin, end, size: [False, True],
}
KINDS = ("F64", "F32", "F16", "BF16", "I32", "I64", "F8_E4M3", "BOOL", "f32", "")
HEADERS: dict[str, tuple[str, ...]] = {
    "entry": (*ODD,),
    "field missing": ("dtype", "shape", "data_offsets"),
    "field more": ("",),
    "dtype": KINDS,
    "shape": (*SHAPES,),
    "offsets": (*OFFSETS,),
    "name": (*NAMES,),
    "entry missing": ("",),
    "entry twice": ("",),
    "metadata": (*ODD,),
    "header": (*ODD,),
    "length": ("0", "1", "-1", "+8", "100000001", "2**63", "2**64-1"),
    "trailing bytes": ("1", "4096"),
    "truncated": ("",),
    "flip in the header": ("",),
    "text in the header": ("deep", "digits", "no UTF-8"),
}
"""Details by change of a header."""


def change_header(draft: Draft, name: str, detail: str, place: float) -> None:
    """Change the header of a file of weights."""
    file, tensor = tensor_at(draft, place)
    header = draft.headers[file]
    entry = header[tensor]
    if name == "entry":
        header[tensor] = ODD[detail]
    elif name == "field missing":
        del entry[detail]
    elif name == "field more":
        entry["stride"] = [1]
    elif name == "dtype":
        entry["dtype"] = detail
    elif name == "shape":
        entry["shape"] = SHAPES[detail](entry["shape"])
    elif name == "offsets":
        entry["data_offsets"] = OFFSETS[detail](*entry["data_offsets"], len(draft.payloads[file]))
    elif name == "name":
        header[NAMES[detail]] = header.pop(tensor)
    elif name == "entry missing":
        del header[tensor]
    elif name == "entry twice":
        again = f", {json.dumps(tensor)}: {json.dumps(entry)}}}".encode()
        draft.edit(f"header of {file}", lambda text: text[:-1] + again)
    elif name == "metadata":
        header["__metadata__"] = ODD[detail]
    elif name == "header":
        draft.edit(f"header of {file}", lambda text: json.dumps(ODD[detail]).encode())
    else:
        draft.edit(file, lambda content: _changed_file(content, name, detail, place))


def _changed_file(content: bytes, name: str, detail: str, place: float) -> bytes:
    length = int.from_bytes(content[:8], "little")
    if name == "length":
        values = {"-1": length - 1, "+8": length + 8, "2**63": 2**63, "2**64-1": 2**64 - 1}
        return values.get(detail, int(detail) if detail.isdigit() else 0).to_bytes(8, "little") + content[8:]
    if name == "trailing bytes":
        return content + bytes(int(detail))
    if name == "truncated":
        return content[: int(place * len(content))]
    cut = 8 + int(place * length)
    if name == "flip in the header":
        return content[:cut] + bytes([content[cut] ^ 1 << int(place * 997) % 8]) + content[cut + 1 :]
    text = {"deep": b"[" * 10**5, "digits": b"1" * 5000, "no UTF-8": b"\xff\xfe"}[detail]
    return (length + len(text)).to_bytes(8, "little") + content[8:cut] + text + content[cut:]


TENSORS: dict[str, tuple[str, ...]] = {
    "removed": ("",),
    "renamed": (*NAMES,),
    "more": ("F32", "I32", "mtp"),
    "another type": ("F64", "F32", "F16", "BF16", "I32", "F8_E4M3"),
    "not finite": ("nan", "inf"),
    "scalar": ("",),
    "another head": ("equal", "other", "scalar"),
    "another shape": ("transposed", "flat", "with 1"),
}
"""Details by change of a tensor in a file that stays valid."""


def change_tensor(draft: Draft, name: str, detail: str, place: float) -> None:
    """Change a tensor in a file whose header stays valid."""
    file, tensor = tensor_at(draft, place)
    if name == "more":
        shape, extra = [3], "mtp.norm.weight" if detail == "mtp" else "model.more"
        draft.add(file, extra, "F32" if detail == "mtp" else detail, shape, bytes(12))
        return
    if name == "another head":
        _add_head(draft, detail)
        return
    dtype, shape, content = draft.remove(file, tensor)
    if name == "renamed":
        tensor = NAMES[detail]
    elif name == "another type":
        size = {**BYTES_OF, "I32": 4, "F8_E4M3": 1}[detail]
        count = int(np.prod(shape))
        dtype, content = detail, np.zeros(size * count, np.uint8).tobytes() if detail != dtype else content
    elif name == "not finite":
        array = np.frombuffer(content, {8: np.float64, 4: np.float32, 2: np.uint16}[BYTES_OF[dtype]]).copy()
        array[0] = float(detail) if BYTES_OF[dtype] > 2 else 0x7FFF
        content = array.tobytes()
    elif name == "scalar":
        shape, content = [], content[: BYTES_OF[dtype]]
    elif name == "another shape":
        shape = SHAPES[detail](shape)
    if name != "removed":
        draft.add(file, tensor, dtype, shape, content)


def _add_head(draft: Draft, detail: str) -> None:
    """Add an output matrix, or replace the present one."""
    for file, header in draft.headers.items():
        if "lm_head.weight" in header:
            draft.remove(file, "lm_head.weight")
    file = next(file for file, header in draft.headers.items() if "model.embed_tokens.weight" in header)
    entry = draft.headers[file]["model.embed_tokens.weight"]
    begin, end = entry["data_offsets"]
    content = draft.payloads[file][begin:end]
    size = BYTES_OF[entry["dtype"]]
    if detail == "scalar":
        draft.add(file, "lm_head.weight", entry["dtype"], [], content[:size])
    else:
        content = content if detail == "equal" else content[size:] + content[:size]
        draft.add(file, "lm_head.weight", entry["dtype"], entry["shape"], content)


PLACES = {
    "parent": "../outside/model.safetensors",
    "absolute": "{outside}/model.safetensors",
    "here": f"./{FIRST}",
    "sub": f"sub/{FIRST}",
    "dots": "..",
    "empty": "",
    "zero byte": "a\0b",
    "surrogate": "a\ud800.safetensors",
    "long": "x" * 5000,
    "lines": "a\nb.safetensors",
    "missing": "model-00003-of-00002.safetensors",
    "another format": "pytorch_model.bin",
}
"""Odd places of a tensor in an index."""
INDICES: dict[str, tuple[str, ...]] = {
    "place": (*PLACES,),
    "place odd": (*ODD,),
    "map odd": (*ODD,),
    "no map": ("",),
    "one shard alone": ("",),
    "other shard": ("",),
    "more names": ("",),
    "in two shards": ("equal", "other"),
    "beside one file": ("equal", "other"),
}
"""Details by change of an index."""


def change_index(draft: Draft, name: str, detail: str, place: float, outside: str) -> None:
    """Change the index of shards."""
    if draft.index is None:
        draft.split()
    files = draft.index["weight_map"]
    tensor = pick(sorted(files), place)
    if name == "place":
        files[tensor] = PLACES[detail].replace("{outside}", outside)
    elif name == "place odd":
        files[tensor] = ODD[detail]
    elif name == "map odd":
        draft.index["weight_map"] = ODD[detail]
    elif name == "no map":
        del draft.index["weight_map"]
    elif name == "one shard alone":
        draft.index["weight_map"] = {tensor: file for tensor, file in files.items() if file == FIRST}
    elif name == "other shard":
        files[tensor] = FIRST if files[tensor] == SECOND else SECOND
    elif name == "more names":
        files["model.more"] = FIRST
    elif name == "in two shards":
        _copy_tensor(draft, tensor, files[tensor], FIRST if files[tensor] == SECOND else SECOND, detail)
    elif name == "beside one file":
        draft.headers[SINGLE], draft.payloads[SINGLE] = {}, b""
        for each, file in files.items():
            _copy_tensor(draft, each, file, SINGLE, detail if each == tensor else "equal")


def _copy_tensor(draft: Draft, tensor: str, source: str, target: str, detail: str) -> None:
    entry = draft.headers[source][tensor]
    if not isinstance(entry, dict) or not isinstance(entry.get("data_offsets"), list):
        return
    begin, end = entry["data_offsets"][:2]
    content = draft.payloads[source][int(begin) : int(end)]
    content = content if detail == "equal" else content[8:] + content[:8]
    draft.add(target, tensor, entry["dtype"], entry["shape"], content)
