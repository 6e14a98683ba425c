"""Chat templates in jinja2's sandbox, with what transformers gives them, but for a date that is fixed.

A template is a program from elsewhere: whatever it throws is a TemplateFailure of one line.
"""
import datetime
import json
import sys
from collections import namedtuple

from .errors import Refusal

DATE = "2024-07-26"  # date that strftime_now tells by default: the same data make the same tokens every day
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of the field of a message with its thoughts
# Written around the text of {% generation %} blocks while they are looked for; templates have no such characters.
OPEN, CLOSE = "\U0010fff0", "\U0010fff1"

# text; spans: (begin, end) in characters of each {% generation %} block, or None where the template has none or hides them.
Rendered = namedtuple("Rendered", "text spans")


class TemplateFailure(Exception):
    """One line: why a template did not write a chat."""


def parse_date(text):
    """Midnight of a day written as YYYY-MM-DD."""
    try:
        return datetime.datetime.strptime(text, "%Y-%m-%d")
    except ValueError:
        raise Refusal(f"--date {text}: no day; write it as YYYY-MM-DD, such as {DATE}") from None


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """The filter tojson, with the arguments and defaults that transformers has; jinja2's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment_for(date):
    """jinja2's sandbox with what transformers lends to templates."""
    try:
        from jinja2 import nodes
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise Refusal("the tokenizer brings a chat template, and jinja2 is missing; try "
                      f"{sys.executable} -m pip install jinja2") from None

    class Generation(Extension):
        """Blocks {% generation %}: the answers, as the author of a template marks them."""
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            self.environment.has_generation = True
            return nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

        def _write(self, caller):
            return f"{OPEN}{caller()}{CLOSE}" if self.environment.tracking else caller()

    def refuse(message):
        raise TemplateFailure(f"refuses the chat: {' '.join(str(message).split())}")

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=refuse, strftime_now=lambda form: date.strftime(form))
    environment.tracking = environment.has_generation = False
    return environment


def failure(error):
    """The TemplateFailure for whatever a template threw."""
    return TemplateFailure(f"fails: {type(error).__name__}: {' '.join(str(error).split())}; mend it, or give a tokenizer "
                           "folder without it")


def spans_in(tracked):
    """The text without marks, and the spans between them; None for the spans where the marks are not in pairs."""
    spans, plain, begin, length = [], [], None, 0
    for piece in tracked.replace(CLOSE, OPEN + CLOSE).split(OPEN):
        if piece.startswith(CLOSE):
            if begin is None:
                return tracked, None
            spans.append((begin, length))
            begin, piece = None, piece[1:]
        elif plain:
            if begin is not None:
                return tracked, None
            begin = length
        plain.append(piece)
        length += len(piece)
    return "".join(plain), spans if begin is None else None


def as_transformers_passes(message):
    """A message without null fields, and with its thoughts under each name that templates have for them."""
    message = {key: value for key, value in message.items() if value is not None}
    thoughts = next((message[key] for key in REASONING if key in message), None)
    return message if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}


class ChatTemplate:
    """The templates of one tokenizer. `sources`: by name, "default" and perhaps "tool_use"; `special_tokens`: by name."""

    def __init__(self, sources, special_tokens, date=DATE):
        self._names, self._compiled = special_tokens, {}
        if "default" not in sources:
            raise Refusal("none of the tokenizer's chat templates is called default; write one to chat_template.jinja")
        for name in {"default", "tool_use"} & set(sources):
            environment = environment_for(parse_date(date))
            try:
                compiled = environment.from_string(sources[name])
            except Exception as error:
                raise Refusal(f"the chat template {failure(error)}") from None
            self._compiled[name] = environment, compiled

    def _chosen(self, chat):
        """Environment and template for a chat: the one for tools where it has some and there is one."""
        name = "tool_use" if chat.tools is not None and "tool_use" in self._compiled else "default"
        return self._compiled[name]

    def marks_answers(self, chat):
        """Whether the template for a chat has {% generation %} blocks."""
        return self._chosen(chat)[0].has_generation

    def write(self, chat, messages, answer=False, tracked=False):
        """The Rendered text of `messages` with the tools of a Chat. `answer`: whether an answer is to follow; `tracked`:
        whether spans are wanted."""
        environment, compiled = self._chosen(chat)
        variables = {**self._names, **chat.variables}
        passed = [as_transformers_passes(m) for m in messages]

        def render(tracking):
            environment.tracking = tracking
            try:
                return compiled.render(messages=passed, tools=chat.tools, documents=chat.documents,
                                       add_generation_prompt=answer, **variables)
            except TemplateFailure:
                raise
            except Exception as error:
                raise failure(error) from None
            finally:
                environment.tracking = False

        text = render(False)
        if not tracked or not environment.has_generation:
            return Rendered(text, None)
        plain, spans = spans_in(render(True))
        # A template may work on the text of a block after it is written; the marks are then in the way.
        return Rendered(text, spans if plain == text else None)
