"""The tokenizer of an imported model, read by the package tokenizers."""

from pathlib import Path
from typing import Any

from diptych.plans.checkpoint import find_checkpoint
from diptych.plans.families.folder import source_of
from diptych.plans.text_files import parse_json, read_text

TOKENIZER = "tokenizer.json"


class FileTokenizer:
    """A tokenizer from tokenizer.json.

    Args:
        source: folder of the file; config.json beside it names the token after a document, eos_token_id.

    Raises:
        ModuleNotFoundError: the package tokenizers is not installed.
        ValueError: the file is no tokenizer.
    """

    def __init__(self, source: Path) -> None:
        try:
            from tokenizers import Tokenizer  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                f"init: expected the package tokenizers for {source / TOKENIZER}, got none; pip install tokenizers"
            ) from None
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(source / TOKENIZER))
        except Exception as error:  # the package raises Exception itself
            raise ValueError(f"{source / TOKENIZER}: expected a tokenizer, got {error}") from None
        end = parse_json(read_text(source / "config.json")).get("eos_token_id")
        end = end[0] if isinstance(end, list) and end else end
        self.separator: list[int] = [end] if isinstance(end, int) else self.encode(b"\n")

    def encode(self, text: bytes) -> list[int]:
        """Return the tokens of a text; bytes that are not UTF-8 become replacement characters."""
        return self._tokenizer.encode(text.decode(errors="replace"), add_special_tokens=False).ids

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens."""
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


def tokenizer_beside(checkpoint: Path | None) -> FileTokenizer | None:
    """Return the tokenizer beside a checkpoint (a file or folder); None if there is none, or no checkpoint."""
    source = None if checkpoint is None else source_of(find_checkpoint(checkpoint))
    return FileTokenizer(source) if source is not None and (source / TOKENIZER).is_file() else None
