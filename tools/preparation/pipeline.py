"""One record from what was read to token ids and targets."""
from collections import namedtuple

from .errors import Refusal
from .folder import TokenizerFolder
from .preferences import SIDES, preference, refuse_empty, refuse_equal
from .records import Chat, Text, normalise, with_joined_parts
from .targets import Answers
from .templates import REASONING, ChatTemplate
from .tokens import Encoder, find_end_token, load_tokenizer

# Text before and behind each content of a chat, where the tokenizer brings no template.
HEADER, BEHIND = "<|{role}|>\n", "\n"

# form: one of FORMATS. text: what was encoded. roles, names: of a chat's messages, and where each stands in the record.
# encoded: an Encoded. targets: of a chat that a template wrote, else None.
Prepared = namedtuple("Prepared", "form text roles names encoded targets")


class Pipeline:
    """Prepares records with one tokenizer's folder. One process's own; `options` makes the same one in another.

    tokenizer: file or folder. end_token: text, or None for the tokenizer's own. no_end_token, special_tokens: whether texts
    end with one, and whether they get those that the tokenizer itself adds. form: of FORMATS. date: for templates."""

    def __init__(self, tokenizer, end_token=None, no_end_token=False, special_tokens=True, form="auto", date=None):
        folder = TokenizerFolder(tokenizer)
        self.file, self.form, self.date = folder.file, form, date
        self.positions = folder.positions()
        self.tokenizer, self.new_tokens, self.overridden = load_tokenizer(folder)
        # Ids of tokenizer.json; tokens that only the folder's other files name come behind them.
        self.vocabulary = self.tokenizer.get_vocab_size(with_added_tokens=True) - len(self.new_tokens)
        self.end = None if no_end_token else find_end_token(self.tokenizer, folder, end_token, self.new_tokens)
        self.encoder = Encoder(self.tokenizer, self.end, special_tokens)
        self.sources, self.special_tokens = folder.chat_templates(), folder.special_tokens()
        self._template = None

    def template(self):
        """The ChatTemplate of the folder, compiled when it is first asked for; None where there is none."""
        if self._template is None and self.sources:
            self._template = ChatTemplate(self.sources, self.special_tokens, *([self.date] if self.date else []))
        return self._template

    def facts(self):
        """Facts that tokens depend on, beside tokenizer.json itself, as JSON writes them."""
        return [self.end and self.end.id, self.encoder.before, self.encoder.after, self.encoder.added, self.sources,
                self.overridden, self.special_tokens, self.form, self.date]

    def prepare(self, raw, place):
        """The Prepared record of what inputs.records_of gives; refuses it by its place."""
        prepared = self.prepare_all(raw, place)
        if len(prepared) > 1:
            raise Refusal(f"{place}: preferences are learnt in pairs: tandem prepare makes a token file of them, and "
                          "tandem train --objective dpo trains on it")
        return prepared[0]

    def prepare_all(self, raw, place):
        """Prepares all records of a line: two of a preference, for the chosen answer and the rejected one; else one."""
        form, record = normalise(raw, place, self.form, bool(self.sources))
        if form != "preference":
            return (self._prepared(form, record, place),)
        pair = preference(record, place)
        made = tuple(self._prepared(form, answer, f"{place}: {side}") for side, answer in zip(SIDES, pair))
        for side, answer in zip(SIDES, made):
            if not any(answer.encoded.mask[1:]):
                refuse_empty(side, place)
        refuse_equal(*(answer.encoded.ids for answer in made), place)
        return made

    def _prepared(self, form, record, place):
        """The Prepared record of a Text, a Prompt or a Chat."""
        if isinstance(record, Text):
            return Prepared(form, record.text, [], [], self.encoder.text(record.text, place), None)
        roles, names = ([m["role"] for m in record.messages], record.names) if isinstance(record, Chat) else ([], [])
        if isinstance(record, Chat) and self.template():
            found = Answers(self.template(), record, place, self.encoder.added).find()
            encoded = self.encoder.chat(found.text, place, found.spans, found.marked)
            return Prepared(form, found.text, roles, names, encoded, found)
        pieces = plain_chat(record, place) if isinstance(record, Chat) else record.pieces
        text, spans = joined(pieces)
        return Prepared(form, text, roles, names, self.encoder.text(text, place, spans, pieces[-1][1]), None)


def joined(pieces):
    """One text of (text, whether it is learnt), and the spans that are."""
    spans, length = [], 0
    for text, learnt in pieces:
        if learnt and text:
            spans.append((length, length + len(text)))
        length += len(text)
    return "".join(text for text, _ in pieces), spans


def plain_chat(chat, place):
    """Pieces of a chat without a template; refuses what only a template can write."""
    for name in ("tools", "documents"):
        if getattr(chat, name):
            raise Refusal(f"{place}: field {name}: the tokenizer brings no chat template to write them; give one that does, or "
                          "leave such records out")
    pieces = []
    for message, where, trained in zip(map(with_joined_parts, chat.messages), chat.names, chat.trained):
        for name in ("tool_calls", *REASONING):
            if message.get(name):
                raise Refusal(f"{place}: {where}.{name}: the tokenizer brings no chat template to write them; give one "
                              "that does, or leave such records out")
        pieces.append((HEADER.format(role=message["role"]), False))
        pieces.append((message["content"] + BEHIND, trained))
    return pieces
