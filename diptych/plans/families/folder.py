"""Conversion between a Hugging Face folder and a checkpoint of this project, one tensor at a time.

A Hugging Face folder has ``config.json`` and either ``model.safetensors`` or shards with an index. A converted model is
a folder with a checkpoint of weights alone, and with the files of the source that its export and its tokenizer need.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from diptych.plans.checkpoint import MODEL, check_unused, find_checkpoint, open_weights, write_weights
from diptych.plans.config import TransformerConfig
from diptych.plans.families import FAMILIES, find_family
from diptych.plans.families.family import Family, FamilyError, config_of, parse_model
from diptych.plans.families.layouts import Link, assemble
from diptych.plans.tensor_files import FLOATING_TYPES, TensorFile, TensorInfo, bytes_of, write_tensors
from diptych.plans.text_files import one_line, parse_json, read_text

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SOURCE = "source"
"""Folder beside a checkpoint with the files of its Hugging Face folder, without the weights."""
COPIED = (
    *(CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("vocab.json", "merges.txt", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
)
"""Files of the source that are copied, if they exist."""
SHARD_BYTES = 5 * 10**9
"""Largest size of an exported shard, as in transformers."""
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
MANY = 100_000
"""Layers and experts whose layouts take about 100 MB."""
LONGEST_NAME = 255
"""Characters of the longest file name."""
LONGEST_LIST = 5
"""Names that an error lists."""


class Imported(NamedTuple):
    """A converted model."""

    checkpoint: Path
    model: TransformerConfig
    family: Family
    skipped: tuple[str, ...]
    """Tensors that were left out, because transformers does not read them either."""


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's config.json.

    Raises:
        FamilyError: there is none, or it is not a JSON object.
    """
    try:
        content = parse_json(read_text(folder / CONFIG))
    except (OSError, ValueError) as error:
        raise FamilyError(f"{folder}: expected a Hugging Face folder with {CONFIG}, got {one_line(error)}") from None
    if not isinstance(content, dict):
        raise FamilyError(f"{folder / CONFIG}: expected a JSON object, got {one_line(content)}")
    return content


def model_of(folder: Path) -> tuple[Family, TransformerConfig]:
    """Return the family and the configuration of a folder's model, in float32.

    Raises:
        FamilyError: the model is not supported; the message names the setting.
    """
    config = read_config(folder)
    family = find_family(config)
    return family, parse_model(family, config)


def import_folder(folder: Path, output: Path) -> Imported:
    """Convert a Hugging Face folder to a checkpoint of weights.

    If a tensor is float64, all weights become float64, otherwise float32; both conversions are exact. About two tensors
    are in memory at a time.

    Args:
        folder: the Hugging Face folder.
        output: folder for the checkpoint; it must have none yet.

    Raises:
        FamilyError: the model is not supported, or tensors are missing, unknown or of another shape.
        CheckpointError: the checkpoint cannot be written.
    """
    family, model = model_of(folder)
    check_unused(output)
    if (output / SOURCE).exists():
        raise FamilyError(f"{output}: expected a folder without {SOURCE}, got one with it; give another, or remove it")
    tensors = _Tensors(folder, family.other_names)
    _check_number(tensors, model)
    links = family.links(model)
    skipped = _check_names(tensors, links, family, model)
    if any(tensors.info(name).dtype == "F64" for name in tensors.names):
        model = replace(model, params_dtype="float64")
    sources = {layout.name: (layout, link) for link in links for layout in link.ours}

    def read(name: str) -> np.ndarray:
        target, link = sources[name]
        read_theirs = partial(_read_rows, tensors, link) if link.are_rows_of_one else tensors.read
        return assemble(target, link.theirs, read_theirs, np.dtype(model.params_dtype))

    checkpoint = write_weights(output, model, read)
    copy_source(folder, output / SOURCE)
    return Imported(checkpoint, model, family, skipped)


def copy_source(folder: Path, output: Path) -> None:
    """Copy the files of COPIED that a folder has."""
    output.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, output / name)


def source_of(checkpoint: Path) -> Path | None:
    """Return the folder with the source's files of a checkpoint (a file or its folder), or None if there is none."""
    folder = (checkpoint if checkpoint.is_dir() else checkpoint.parent) / SOURCE
    return folder if (folder / CONFIG).is_file() else None


def export_folder(run: Path, folder: Path, family: str | None = None, dtype: str | None = None) -> list[Path]:
    """Convert a checkpoint to a Hugging Face folder that transformers loads.

    Args:
        run: a checkpoint, or a folder whose newest checkpoint is exported.
        folder: folder to write; it must not have config.json or weights yet.
        family: name of the family; None: that of the folder from which the model was imported.
        dtype: float32, float64, float16 or bfloat16; None: that of the checkpoint.

    Returns:
        The paths of the written weights.

    Raises:
        FamilyError: no family has such a model, or the folder is in use or cannot be made.
        CheckpointError: the checkpoint cannot be read.
    """
    path = find_checkpoint(run)
    weights, model = open_weights(path)
    source = source_of(path)
    like = None if source is None else read_config(source)
    table = _family(family, like)
    _check_new(folder)
    dtype = dtype or model.params_dtype
    if dtype not in FLOATING_TYPES:
        raise FamilyError(f"dtype: expected one of {', '.join(FLOATING_TYPES)}, got {dtype!r}")
    config = config_of(table, model, like) | {"dtype": dtype}
    config.pop("torch_dtype", None)
    links = table.links(model)
    sources = {layout.name: (layout, link.ours) for link in links for layout in link.theirs}
    kind = np.dtype(dtype) if dtype != "bfloat16" else np.dtype(np.float32)

    read_ours = lru_cache(maxsize=1)(lambda own: weights.read(MODEL + own))  # many experts come from one array

    def read(name: str) -> np.ndarray:
        target, ours = sources[name]
        return assemble(target, ours, read_ours, kind)

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FamilyError(f"{folder}: expected a folder to write to, got {error.strerror}") from None
    infos = {name: TensorInfo(FLOATING_TYPES[dtype], layout.shape) for name, (layout, _) in sources.items()}
    written = []
    if source is not None:
        copy_source(source, folder)
    shards = [*_shards(infos)]
    for number, names in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(folder / name, {each: infos[each] for each in names}, read, metadata={"format": "pt"})
        written.append(folder / name)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": bytes_of(infos.values())},
            "weight_map": {name: path.name for names, path in zip(shards, written, strict=True) for name in names},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return written


def _check_new(folder: Path) -> None:
    """Check that a folder has no files of a model.

    Raises:
        FamilyError: the folder has config.json, an index or weights.
    """
    files = (folder / CONFIG, folder / INDEX, *sorted(folder.glob("*.safetensors")))
    used = next((path.name for path in files if path.exists()), None)
    if used is not None:
        raise FamilyError(f"{folder}: expected a new folder, got one with {used}; give another, or remove it")


def _family(name: str | None, like: Mapping[str, Any] | None) -> Family:
    """Return the family by name, or that of the source's config.json."""
    if name is None and like is not None:
        return find_family(like)
    if name not in FAMILIES:
        raise FamilyError(
            f"family: expected one of {', '.join(FAMILIES)} for a model that was not imported, got {name!r}"
        )
    return FAMILIES[name]


def _shards(infos: Mapping[str, TensorInfo]) -> Iterator[list[str]]:
    """Yield the names of the tensors of each shard, in order."""
    names: list[str] = []
    size = 0
    for name, info in infos.items():
        each = bytes_of([info])
        if names and size + each > SHARD_BYTES:
            yield names
            names = []
            size = 0
        names.append(name)
        size += each
    yield names


class _Tensors:
    """The tensors of a folder, read from its shards on demand.

    Args:
        folder: the folder.
        others: parts of names by what may stand in their place; see Family.other_names.

    Raises:
        FamilyError: there are no weights, the index is damaged, a shard is missing, or a tensor has two names.
    """

    def __init__(self, folder: Path, others: Mapping[str, str]) -> None:
        self.folder = folder
        if (folder / SINGLE).is_file():  # transformers also reads this one beside an index
            files = {SINGLE}
        elif (folder / INDEX).is_file():
            files = self._shards_of_index(folder / INDEX)
        else:
            raise FamilyError(f"{folder}: expected {SINGLE} or {INDEX}, got neither; save it with safetensors")
        self._others = others
        self._place_of: dict[str, tuple[TensorFile, str]] = {}
        for name in sorted(files):
            try:
                file = TensorFile(folder / name)
            except OSError as error:
                raise FamilyError(f"{folder / name}: expected a shard of the index, got {one_line(error)}") from None
            for own in file.tensors:
                usual = self.usual(own)
                if usual in self._place_of:
                    other, known = self._place_of[usual]
                    first, second = (one_line(each, quotes=False) for each in (known, own))
                    raise FamilyError(
                        f"{folder}: expected either {first} in {other.path.name} or {second} in {name}, got both; "
                        "remove one"
                    )
                self._place_of[usual] = file, own

    def _shards_of_index(self, path: Path) -> set[str]:
        try:
            index = parse_json(read_text(path))
        except (OSError, ValueError) as error:
            raise FamilyError(f"{path}: expected an index with a weight_map, got {one_line(error)}") from None
        places = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(places, dict):
            raise FamilyError(f"{path}: expected an index with a weight_map, got {one_line(index)}")
        for name in places.values():
            if not _is_file_name(name):
                raise FamilyError(f"{path}: expected names of files in this folder, got {one_line(name)}")
        return {*places.values()}

    def usual(self, name: str) -> str:
        """Return a name with the parts that stand for others."""
        return ".".join(self._others.get(part, part) for part in name.split("."))

    @property
    def names(self) -> list[str]:
        """Usual names of all tensors."""
        return [*self._place_of]

    def info(self, name: str) -> TensorInfo:
        """Return type and shape of a tensor."""
        file, own = self._place_of[self.usual(name)]
        return file.tensors[own]

    def read(self, name: str) -> np.ndarray:
        """Return a tensor."""
        file, own = self._place_of[self.usual(name)]
        return file.read(own)


def _is_file_name(name: Any) -> bool:
    """Return True if a value names a file in a folder."""
    return isinstance(name, str) and Path(name).name == name and name.isprintable() and len(name) <= LONGEST_NAME


def _read_rows(tensors: _Tensors, link: Link, name: str) -> np.ndarray:
    """Return one tensor of a link whose tensors may be cut at other rows in the files."""
    joined = np.concatenate([tensors.read(layout.name) for layout in link.theirs])
    places = [layout.name for layout in link.theirs]
    ends = np.cumsum([layout.shape[0] for layout in link.theirs])
    return np.split(joined, ends[:-1])[places.index(name)]


def _check_names(tensors: _Tensors, links: Sequence[Link], family: Family, model: TransformerConfig) -> tuple[str, ...]:
    """Reject missing and unknown tensors, and other shapes or types; return the names of the tensors to skip."""
    shapes = {tensors.usual(layout.name): layout.shape for link in links for layout in link.theirs}
    found = set(tensors.names)
    skipped = {name for name in found - shapes.keys() if name.startswith(family.ignored_tensors)}
    if not model.untie_embeddings_and_output_weights and HEAD in found:
        skipped.add(HEAD)
    for names, what in ((shapes.keys() - found, "no"), (found - shapes.keys() - skipped, "also")):
        if names:
            listed = ", ".join(one_line(name, quotes=False) for name in sorted(names)[:LONGEST_LIST])
            listed += "..." if len(names) > LONGEST_LIST else ""
            raise FamilyError(
                f"{tensors.folder}: expected the {len(shapes)} tensors of {family.name}, got {what} {listed}"
            )
    for link in links:
        if link.are_rows_of_one:
            found_rows = [next(iter(tensors.info(layout.name).shape), 0) for layout in link.theirs]
            if sum(found_rows) == sum(layout.shape[0] for layout in link.theirs):
                for layout, rows in zip(link.theirs, found_rows, strict=True):
                    shapes[tensors.usual(layout.name)] = (rows, *layout.tail)
    for name, shape in shapes.items():
        info = tensors.info(name)
        if info.shape != shape or info.dtype not in FLOATING_TYPES.values():
            raise FamilyError(
                f"{tensors.folder}, {name}: expected shape {list(shape)} in {', '.join(FLOATING_TYPES)}, got "
                f"{one_line([*info.shape])} in {one_line(info.dtype, quotes=False)}"
            )
    if HEAD in skipped:
        _check_copy(tensors, HEAD, EMBEDDING)
    return tuple(sorted(skipped))


def _check_number(tensors: _Tensors, model: TransformerConfig) -> None:
    """Check the number of tensors if so many layers and experts are expected that their layouts need much memory.

    Raises:
        FamilyError: there are fewer tensors than layers and experts.
    """
    experts = model.num_moe_experts or 0
    least = sum(experts if model.layer(number).moe else 1 for number in range(model.num_layers))
    if least > max(len(tensors.names), MANY):
        raise FamilyError(
            f"{tensors.folder}: expected the tensors of {model.num_layers:,} layers, with {experts:,} experts in each "
            f"mixture, got {len(tensors.names):,} tensors; compare the numbers in {CONFIG}"
        )


def _check_copy(tensors: _Tensors, name: str, original: str) -> None:
    """Check that a tensor is a copy of another one.

    Raises:
        FamilyError: it is not; transformers then does not tie them.
    """
    is_copy = tensors.info(name) == tensors.info(original)
    if not (is_copy and np.array_equal(tensors.read(name), tensors.read(original))):
        raise FamilyError(
            f"{tensors.folder}, {name}: expected a copy of {original}, by tie_word_embeddings in {CONFIG}, got another "
            "tensor; set it to false if both are right"
        )
