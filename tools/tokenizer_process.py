#!/usr/bin/env python3
"""The tokenizer of tandem sample: started by the program, which writes a request to a line and reads the answer from another.

    tools/tokenizer_process.py FOLDER

FOLDER holds tokenizer.json and the files beside it. Requests and answers are objects of JSON:
  {}                             {"template": whether there is a chat template}
  {"encode": text}               {"ids": [...]}, with the special tokens that the tokenizer writes before a text
  {"chat": [messages]}           {"ids": [...]} of the chat as its template writes it, up to where the answer begins
  {"stream": n, "begin": [ids]}  {"text": ""}; text of the tokens that follow these ids
  {"stream": n, "next": id}      {"text": of the characters that this token completes}
  {"stream": n, "end": true}     {"text": of a character that was not completed}
  any that is refused            {"error": why, in one line}
Special tokens have no text. Ends with its standard input.
"""
import datetime
import json
import sys

from preparation.errors import Refusal
from preparation.folder import TokenizerFolder
from preparation.records import Chat
from preparation.templates import ChatTemplate, TemplateFailure
from preparation.tokens import Encoder, encode, load_tokenizer, refuse_half_pairs

REPLACEMENT = "\ufffd"  # stands for bytes that are no character yet
MOST_HELD = 8  # tokens of a character that is never completed
CONTEXT = 8  # tokens before a stream that its first text may depend on


class Stream:
    """Text of tokens as they come. Blanks and characters may depend on the tokens before, so these are decoded again."""

    def __init__(self, tokenizer, ids):
        self._tokenizer, self._ids = tokenizer, ids[-CONTEXT:]
        self._begin, self._shown = 0, len(self._ids)

    def _decode(self, ids):
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def next(self, token):
        """Text that `token` completes."""
        self._ids.append(token)
        before, text = self._decode(self._ids[self._begin:self._shown]), self._decode(self._ids[self._begin:])
        held = len(self._ids) - self._shown
        if held < MOST_HELD and (len(text) <= len(before) or text.endswith(REPLACEMENT)):
            return ""
        if len(text) <= len(before):  # special tokens, say: the next text goes on from the last one
            del self._ids[self._shown:]
            return ""
        self._begin, self._shown = self._shown, len(self._ids)
        return text[len(before):]

    def end(self):
        """Text of what is held back."""
        before, text = self._decode(self._ids[self._begin:self._shown]), self._decode(self._ids[self._begin:])
        self._shown = len(self._ids)
        return text[len(before):]


class Tokenizer:
    """Answers requests for one folder."""

    def __init__(self, name):
        folder = TokenizerFolder(name)
        self._tokenizer, _, _ = load_tokenizer(folder)
        self._encoder = Encoder(self._tokenizer)
        self._sources, self._special_tokens = folder.chat_templates(), folder.special_tokens()
        self._template = None
        self._streams = {}

    def answer(self, request):
        """The answer to a request."""
        if "encode" in request:
            return {"ids": self._text(request["encode"])}
        if "chat" in request:
            return {"ids": self._chat(request["chat"])}
        if "begin" in request:
            self._streams[request["stream"]] = Stream(self._tokenizer, request["begin"])
            return {"text": ""}
        if "next" in request:
            return {"text": self._streams[request["stream"]].next(request["next"])}
        if "end" in request:
            return {"text": self._streams.pop(request["stream"]).end()}
        return {"template": bool(self._sources)}

    def _text(self, text):
        refuse_half_pairs(text, "--prompt")
        ids, before = encode(self._tokenizer, text, "--prompt").ids, self._encoder.before
        return ids if before and ids[:len(before)] == before else before + ids

    def _chat(self, messages):
        if self._template is None:
            today = datetime.date.today().isoformat()
            self._template = ChatTemplate(self._sources, self._special_tokens, today)
        chat = Chat(messages, [], [], None, None, {})
        try:
            text = self._template.write(chat, messages, answer=True).text
        except TemplateFailure as failure:
            raise Refusal(f"the chat template {failure}") from None
        refuse_half_pairs(text, "the chat")
        return encode(self._tokenizer, text, "the chat").ids


def serve(name, requests, answers):
    """Answers requests until there are no more; returns the exit code."""
    tokenizer = None
    for line in requests:
        try:
            tokenizer = tokenizer or Tokenizer(name)
            answer = tokenizer.answer(json.loads(line))
        except Refusal as refusal:
            answer = {"error": " ".join(str(refusal).split())}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        sys.exit(0 if "--help" in sys.argv else 2)
    sys.exit(serve(sys.argv[1], sys.stdin, sys.stdout))
