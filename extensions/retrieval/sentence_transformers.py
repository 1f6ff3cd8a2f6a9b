"""The files by which sentence-transformers loads a folder of `transformers` as a model of vectors: which modules follow
each other (the model, pooling, normalization), how tokens are pooled, and the texts before queries and documents.

Their form is the one that its versions from 2 on read. A run writes them next to its checkpoints, and exports and
conversions copy them (`model_files` in `extension.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from errors import UserError
from extensions.retrieval.keys import Pooling
from models.storage.tensor_files import load_json

POOLING_FILE = "1_Pooling/config.json"
_MODES = {Pooling.last: "pooling_mode_lasttoken", Pooling.mean: "pooling_mode_mean_tokens"}
_OTHER_MODES = ("cls_token", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens")
_MODULES = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))


@dataclass(frozen=True)
class SentenceModel:
    """How texts become vectors. size: of a vector. prompts: the text before each, by its kind, query or document."""

    size: int
    pooling: Pooling
    max_seq_length: int
    prompts: Mapping[str, str]

    def save(self, folder: Path) -> None:
        """Write the files next to those of the model."""
        modules = [
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"}
            for number, (path, name) in enumerate(_MODULES)
        ]
        modes = {f"pooling_mode_{mode}": False for mode in _OTHER_MODES}
        modes |= {key: mode is self.pooling for mode, key in _MODES.items()}
        contents = {
            "modules.json": modules,
            "sentence_bert_config.json": {"max_seq_length": self.max_seq_length, "do_lower_case": False},
            "config_sentence_transformers.json": {
                "prompts": dict(self.prompts),
                "default_prompt_name": None,
                "similarity_fn_name": "cosine",
            },
            POOLING_FILE: {"word_embedding_dimension": self.size, **modes, "include_prompt": True},
        }
        for name, content in contents.items():
            file = folder / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def check(self, folder: Path) -> None:
        """Raise UserError where the folder's own files make vectors in another way: by other modules, or pooled
        otherwise."""
        if (folder / "modules.json").is_file():
            _check_modules(folder / "modules.json")
        file = folder / POOLING_FILE
        if not file.is_file():
            return
        fields = load_json(file)
        name = fields.get("pooling_mode")
        by_name = {"lasttoken": Pooling.last, "mean": Pooling.mean}
        chosen = [by_name.get(name)] if name else [mode for mode, key in _MODES.items() if fields.get(key)]
        if chosen != [self.pooling]:
            own = chosen[0].value if chosen and chosen[0] is not None else name or "another one"
            raise UserError(
                f"embedding.pooling={self.pooling.value}: {file} says {own}; give the model's own, or remove that "
                "folder to train it otherwise"
            )


def _check_modules(file: Path) -> None:
    try:
        modules = json.loads(file.read_text(encoding="utf-8"))
        types = [str(module["type"]).rsplit(".", 1)[-1] for module in modules]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{file} cannot be read ({type(error).__name__}: {error})") from None
    known = [name for _, name in _MODULES]
    if others := [name for name in types if name not in known]:
        raise UserError(
            f"{file} has a module '{others[0]}', which would be lost: only {', '.join(known)} are trained and exported "
            "here; remove that file to train the model without it"
        )
