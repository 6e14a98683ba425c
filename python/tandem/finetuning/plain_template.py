"""The chat template of a model that has none: lines `<|role|>`, and the end token behind each answer."""
from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from .refusal import Refusal

NAME = "chat_template.jinja"
_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json", "generation_config.json")
_TEMPLATE = ("{{% if tools %}}{{{{ raise_exception('the model has no chat template to write tools; leave such records out, or put one beside "
             "its tokenizer') }}}}{{% endif %}}{{{{ {begin} }}}}{{% for message in messages %}}{{% if not loop.first %}}{{{{ '\\n' }}}}{{% endif %}}"
             "{{{{ '<|' + message['role'] + '|>\\n' + message['content'] }}}}{{% if message['role'] == 'assistant' %}}{{{{ {end} }}}}{{% endif %}}"
             "{{% endfor %}}{{% if add_generation_prompt %}}{{{{ '\\n<|assistant|>\\n' }}}}{{% endif %}}")


def template_of(pipeline: Any) -> str:
    """The template, for the tokenizer of a preparation.pipeline.Pipeline. Raises Refusal where nothing could end an answer."""
    if pipeline.end is None:
        raise Refusal(f"{pipeline.file.parent}: the model has no chat template, and names no end token that could end an answer; put its "
                      "eos_token into tokenizer_config.json", 2)
    begin = "".join(pipeline.tokenizer.id_to_token(i) for i in pipeline.encoder.before)
    return _TEMPLATE.format(begin=_literal(begin), end=_literal(pipeline.end.text))


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def write_folder(model: Path, folder: Path, template: str) -> None:
    """Writes a folder of the model's tokenizer with this template."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        if (model / name).is_file():
            shutil.copyfile(model / name, folder / name)
    (folder / NAME).write_text(template, encoding="utf-8")
