"""Memory and time of importing a model of 8 GB in 16 shards, and of exporting it again.

python -m benchmarks.import_memory [--folder FOLDER]          (needs 35 GB of disk)

Writes benchmarks/results/import_memory.json. Each conversion is a process of its own; its memory is the peak resident
set, less that of a process which imports the same modules.
"""

import argparse
import json
import math
import platform
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import numpy as np

from diptych.plans.config import TransformerConfig
from diptych.plans.families import find_family
from diptych.plans.families.family import settings_of
from diptych.plans.families.folder import CONFIG, INDEX, export_folder, import_folder
from diptych.plans.tensor_files import TensorInfo, write_tensors

RESULT = Path(__file__).parent / "results" / "import_memory.json"
SHARDS = 16
SIZES = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 18,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
"""A Llama model of 4.2 billion parameters, 8.4 GB in bfloat16."""
MIB = 2**20


def make_folder(folder: Path) -> tuple[int, int]:
    """Write the model and return the bytes of its weights, and of its largest tensor in float32."""
    family = find_family(SIZES)
    model = TransformerConfig(**settings_of(family, SIZES))
    shapes = {layout.name: layout.shape for link in family.links(model) for layout in link.theirs}
    (folder / CONFIG).write_text(json.dumps(SIZES))
    names = [*shapes]
    share = -(-len(names) // SHARDS)
    index, generator = {}, np.random.default_rng(0)
    for number in range(SHARDS):
        file = f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors"
        own = names[number * share : (number + 1) * share]
        tensors = {name: TensorInfo("BF16", shapes[name]) for name in own}
        write_tensors(folder / file, tensors, lambda name: generator.standard_normal(shapes[name], np.float32))
        index |= dict.fromkeys(own, file)
        print(f"shard {number + 1} of {SHARDS}", file=sys.stderr)
    total = 2 * sum(math.prod(shape) for shape in shapes.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}))
    return total, 4 * max(math.prod(layout.shape) for link in family.links(model) for layout in link.ours)


def measure(action: str, *paths: Path) -> dict[str, float]:
    """Run a conversion in a process of its own and return its seconds and its peak resident set in MiB."""
    words = [sys.executable, "-m", "benchmarks.import_memory", "--action", action, "--paths", *map(str, paths)]
    found = subprocess.run(words, check=True, capture_output=True, text=True)
    return json.loads(found.stdout.splitlines()[-1])


def act(action: str, paths: list[Path]) -> None:
    """Convert, or do nothing, and print seconds and the peak resident set."""
    begin = time.perf_counter()
    if action == "import":
        import_folder(*paths)
    elif action == "export":
        export_folder(*paths, dtype="bfloat16")
    seconds = time.perf_counter() - begin
    print(json.dumps({"seconds": seconds, "mib": peak_kib() / 1024}))


def peak_kib() -> int:
    """Return this process's peak resident set; getrusage also counts the process that started it."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where to write; default: the system's temporary folder")
    parser.add_argument("--action", choices=("import", "export", "nothing"), help=argparse.SUPPRESS)
    parser.add_argument("--paths", type=Path, nargs="*", default=[], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.action:
        return act(given.action, given.paths)
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        theirs, ours, out = (Path(name) / part for part in ("theirs", "ours", "out"))
        theirs.mkdir()
        total, largest = make_folder(theirs)
        base = measure("nothing")["mib"]
        rows = {
            action: measure(action, *paths) for action, paths in (("import", (theirs, ours)), ("export", (ours, out)))
        }
    result = {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "shards": SHARDS,
        "weights in bfloat16, MiB": total / MIB,
        "largest parameter in float32, MiB": largest / MIB,
        "modules, MiB": base,
        **{name: {"seconds": row["seconds"], "MiB beside modules": row["mib"] - base} for name, row in rows.items()},
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
