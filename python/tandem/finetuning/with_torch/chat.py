"""A conversation with a model of transformers. Imports torch."""
from __future__ import annotations

from pathlib import Path
from typing import Any, TextIO

import torch

from ..model_folder import check_folder
from ..refusal import Refusal
from .model import read_description, transformers_package

#: Text before and behind a content where the tokenizer has no chat template: as the preparation of data writes it.
_HEADER, _BEHIND = "<|{role}|>\n", "\n"
#: Share of a GPU's free memory that weights may take; else the CPU computes.
_SHARE = 0.8
#: End of an answer that a question follows.
_NEXT = _BEHIND + _HEADER.format(role="user")


def chat(folder: Path, *, system: str | None, max_tokens: int, temperature: float, stream_in: TextIO, stream_out: TextIO) -> None:
    """Answers the lines of `stream_in`, until it ends or a line says /exit; the conversation is kept, and /reset forgets it. `folder`: a
    model as Hugging Face writes it, or a run whose folder `model` is one. At temperature 0 each token is the likeliest. An answer ends
    at an end token, after `max_tokens`, or where the model's positions are full.

    Blocks. Ctrl-C ends an answer; where lines do not come from a terminal, the chat. Raises Refusal, also at the end where a line was
    left out that did not come from a terminal."""
    conversation = _Conversation(folder / "model" if (folder / "model" / "config.json").is_file() else folder, system, temperature)
    left_out = 0
    _prompt(stream_in, stream_out)
    for line in stream_in:
        text = line.strip()
        if text == "/exit":
            break
        if text == "/reset":
            conversation.forget()
        elif text:
            try:
                left_out += not conversation.answer(text, max_tokens, stream_out)
            except KeyboardInterrupt:
                if not stream_in.isatty():
                    raise
            stream_out.write("\n")
        _prompt(stream_in, stream_out)
    if left_out and not stream_in.isatty():
        raise Refusal(f"chat: {left_out} of the lines had no room in the conversation; begin it anew by a line /reset", 2)


def _prompt(stream_in: TextIO, stream_out: TextIO) -> None:
    """Asks people for a line."""
    if stream_in.isatty():
        stream_out.write("> ")
    stream_out.flush()


class _Conversation:
    """A model, and what has been said."""

    def __init__(self, folder: Path, system: str | None, temperature: float) -> None:
        what = f"MODEL {folder}"
        if not folder.is_dir():
            raise Refusal(f"{what}: there is no such folder; name a run of tandem finetune, or a folder with a model", 2)
        check_folder(folder, what)
        read_description(folder, what)
        transformers = transformers_package(what)
        self._streamer = transformers.TextStreamer
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        if torch.cuda.is_available() and self._model.get_memory_footprint() < _SHARE * torch.cuda.mem_get_info()[0]:
            self._model = self._model.cuda()
        self._temperature = temperature
        self._first = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._first)

    def forget(self) -> None:
        """Begins anew."""
        self._messages = list(self._first)

    def answer(self, text: str, max_tokens: int, stream_out: TextIO) -> bool:
        """Writes the answer as it is made, and keeps it. False: the line is left out, and that told, as it has no room in the model's
        positions."""
        asked = [*self._messages, {"role": "user", "content": text}]
        tokens = self._tokens(asked)
        positions = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        room = max_tokens if positions is None else min(max_tokens, positions - tokens.shape[1])
        if room < 1:
            stream_out.write(f"(left out: the conversation has {tokens.shape[1]} tokens then, and the model {positions} positions; /reset)")
            return False
        new = self._generated(tokens, room, stream_out)
        self._messages = [*asked, {"role": "assistant", "content": new}]
        return True

    def _tokens(self, messages: list[dict[str, str]]) -> torch.Tensor:
        if self._tokenizer.chat_template:
            found = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
        else:
            written = "".join(_HEADER.format(role=each["role"]) + each["content"] + _BEHIND for each in messages)
            found = self._tokenizer(written + _HEADER.format(role="assistant"), return_tensors="pt")["input_ids"]
        tokens: torch.Tensor = found.to(self._model.device)
        return tokens

    def _end_tokens(self) -> list[int]:
        """End tokens of the model's generation, else of its tokenizer."""
        known = self._model.generation_config.eos_token_id
        ends = [] if known is None else [known] if isinstance(known, int) else list(known)
        own = self._tokenizer.eos_token_id
        return sorted({*ends, *([] if own is None else [own])})

    def _generated(self, tokens: torch.Tensor, room: int, stream_out: TextIO) -> str:
        """The answer, written as it is made; where there is no template, when it is whole: it may end where the next question begins."""
        class Writer(self._streamer):  # type: ignore[misc, name-defined]
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                stream_out.write(text)
                stream_out.flush()

        ends, written = self._end_tokens(), bool(self._tokenizer.chat_template)
        how: dict[str, Any] = {"do_sample": self._temperature > 0, "temperature": self._temperature if self._temperature > 0 else None,
                               "top_k": 0 if self._temperature > 0 else None, "top_p": None}
        if written:
            how["streamer"] = Writer(self._tokenizer, skip_prompt=True, skip_special_tokens=True)
        else:
            how |= {"stop_strings": [_NEXT], "tokenizer": self._tokenizer}
        with torch.no_grad():
            all_tokens = self._model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=room, eos_token_id=ends or None,
                                              pad_token_id=ends[0] if ends else 0, num_beams=1, repetition_penalty=1.0, **how)
        text: str = self._tokenizer.decode(all_tokens[0, tokens.shape[1]:], skip_special_tokens=True)
        if written:
            return text
        text = text.partition(_NEXT)[0].removesuffix(_BEHIND)
        stream_out.write(text)
        return text
