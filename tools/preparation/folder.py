"""Files of a tokenizer's folder: which are there, and what they say of special tokens and chat templates."""
import json
from pathlib import Path

from .errors import Refusal

# Special tokens that every tokenizer of transformers may have; a folder may name more.
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def text_in(path):
    """Text of a file; refuses what is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Refusal(f"{path}: byte {error.start} is not UTF-8 text; get the file again") from None
    except OSError as error:
        raise Refusal(f"{path}: cannot be read: {error.strerror}; give rights to it") from None


def object_in(path):
    """The object in a file of JSON; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(text_in(path))
    except RecursionError:
        raise Refusal(f"{path}: nested too deep; get the file again") from None
    except ValueError as error:
        raise Refusal(f"{path}: not JSON ({error}); get the file again") from None
    if not isinstance(content, dict):
        raise Refusal(f"{path}: no object of JSON; get the file again")
    return content


def content_of(token):
    """Text of a special token, which files write as a string or as an object; None of everything else."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


class TokenizerFolder:
    """A tokenizer.json and the files beside it, read when they are asked for.

    `name`: the file, or a folder that holds it."""

    def __init__(self, name):
        self.file = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
        if not self.file.is_file():
            if (Path(name) / "tokenizer.model").is_file():
                raise Refusal(f"--tokenizer {name}: a tokenizer.model alone; make a tokenizer.json of it: "
                              "transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)")
            raise Refusal(f"--tokenizer {name}: no tokenizer.json there; name the file, or a folder that holds it")
        self.path = self.file.parent
        self.config = object_in(self.path / "tokenizer_config.json")
        self.map = object_in(self.path / "special_tokens_map.json")
        for name, content in (("tokenizer_config.json", self.config), ("special_tokens_map.json", self.map)):
            for key in NAMED:
                token = content.get(key)
                text = token.get("content") if isinstance(token, dict) else token
                if not isinstance(text, str) and token is not None:
                    raise Refusal(f"{self.path / name}: {key}: a token's text, or an object with its content, was expected; "
                                  "mend it")

    def special_tokens(self):
        """Special tokens by name, as transformers gives them to templates: those that are null are not there."""
        names = [*NAMED, *(key for key in self.config if key.endswith("_token") and key not in NAMED)]
        found = {name: content_of(self.config.get(name)) or content_of(self.map.get(name)) for name in names}
        extra = self.config.get("extra_special_tokens")
        if isinstance(extra, dict):
            found.update((name, content_of(token)) for name, token in extra.items())
        return {name: token for name, token in found.items() if token}

    def extra_tokens(self):
        """Special tokens without a name of their own."""
        found = []
        for source in (self.config, self.map):
            for key in ("additional_special_tokens", "extra_special_tokens"):
                tokens = source.get(key)
                found += filter(None, map(content_of, tokens)) if isinstance(tokens, list) else []
        return list(dict.fromkeys(found))

    def added_tokens(self):
        """Descriptions of tokens that tokenizer_config.json adds, in the order of their ids."""
        decoder = self.config.get("added_tokens_decoder")
        if not isinstance(decoder, dict):
            return []
        tokens = [(int(i), t) for i, t in decoder.items() if i.isdigit() and content_of(t) and isinstance(t, dict)]
        return [token for _, token in sorted(tokens, key=lambda entry: entry[0])]

    def end_tokens(self):
        """(text or id, where it stands) of each end token that the folder names, the best first."""
        for name, content in (("tokenizer_config.json", self.config), ("special_tokens_map.json", self.map)):
            token = content_of(content.get("eos_token"))
            if token:
                yield token, f"eos_token of {self.path / name}"
        for name in ("generation_config.json", "config.json"):
            content = object_in(self.path / name)
            for holder in (content, content.get("text_config")):
                token = holder.get("eos_token_id") if isinstance(holder, dict) else None
                token = token[0] if isinstance(token, list) and token else token
                if type(token) is int:
                    yield token, f"eos_token_id of {self.path / name}"

    def positions(self):
        """Positions of the model whose config.json lies in the folder; None where that says nothing."""
        content = object_in(self.path / "config.json")
        for holder in (content.get("text_config"), content):
            for key in ("max_position_embeddings", "n_positions"):
                count = holder.get(key) if isinstance(holder, dict) else None
                if type(count) is int and count > 0:
                    return count
        return None

    def chat_templates(self):
        """Sources of the chat templates by name, {} where there is none. Files of templates go before the configuration."""
        found = {}
        if (self.path / "chat_template.jinja").is_file():
            found["default"] = text_in(self.path / "chat_template.jinja")
        more = self.path / "additional_chat_templates"
        if more.is_dir():
            found.update((path.name.removesuffix(".jinja"), text_in(path)) for path in sorted(more.glob("*.jinja")))
        if found:
            return found
        source = self.config.get("chat_template") or object_in(self.path / "chat_template.json").get("chat_template")
        if isinstance(source, list):
            source = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        elif source is not None:
            source = {"default": source}
        source = source or {}
        if not all(isinstance(key, str) and isinstance(text, str) for key, text in source.items()):
            raise Refusal(f"{self.path}: its chat template is no text; get the folder's files again")
        return source
