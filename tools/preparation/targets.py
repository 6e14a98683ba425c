"""Targets of a chat: which characters of what a template writes are the assistant's, and what of a chat it leaves out.

Where an answer stands is told by the template's {% generation %} blocks, which are taken as transformers takes them; without
them by growing prefixes of the chat, compared by character; where a prefix is not what the whole begins with, by stand-ins
in the place of the answer's content. An answer that is not found ends with a refusal, or, where the template rewrites it
once others follow, is no target. So does a last answer of which the template writes nothing.
"""
import json
from collections import namedtuple

from .errors import Refusal
from .records import texts_in, with_joined_parts
from .templates import REASONING, TemplateFailure

# text: the whole chat. spans: targets in characters. marked: whether the template marks them. untaught: answers that are
# no targets as the template rewrites them. dropped: indices of messages whose text is not, or not whole, in the text.
# tools_dropped: whether no tool is named in it. quoted: whether arguments of a call, which are a text of JSON, are in it as a
# text within a text. open_ended: whether the template's marks leave out an end-of-turn token. joined: whether content parts
# were given to the template as one text, as it takes no lists of them.
Targets = namedtuple("Targets", "text spans marked untaught dropped tools_dropped quoted open_ended joined")

# Contents that differ in their first and their last character.
STAND_INS = ("qzjvkQ", "wxhbgW")
CHANCE = 16  # characters below which an answer may be in a text by chance
# A field of content parts that is in the text only where a template writes the parts themselves, rather than their texts.
PROBE = "zqxjkvZ"


def common(one, other):
    """Length of the longest common prefix of two texts."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def common_end(one, other):
    """Length of the longest common suffix of two texts."""
    return common(one[::-1], other[::-1])


class Answers:
    """Finds the answers of one chat. `added`: contents of the tokenizer's added tokens, the longest first."""

    def __init__(self, template, chat, place, added):
        self.template, self.chat, self.place, self.added = template, chat, place, added
        self.messages, self.joined = chat.messages, False
        self.indices = [i for i, m in enumerate(self.messages) if m["role"] == "assistant"]

    def find(self):
        """The Targets of the chat."""
        whole = self._whole()
        marked = self.template.marks_answers(self.chat) and whole.spans is not None
        if marked:
            spans, untaught = self._marked(whole.spans)
        else:
            spans, untaught = self._by_prefixes(whole.text)
        self._refuse_unwritten(whole.text, spans, marked)
        taught = [span for i, span in spans if self.chat.trained[i]]
        dropped = dropped_messages(self.messages, whole.text, dict(spans) if not marked else {})
        named = any(name in whole.text for name in map(tool_name, self.chat.tools or []) if name)
        tools_dropped = bool(self.chat.tools) and not named
        open_ended = marked and any(self._is_open_ended(whole.text, *span) for span in taught)
        quoted = any(json.dumps(a, ensure_ascii=False) in whole.text for m in self.messages for a in arguments_of(m))
        return Targets(whole.text, taught, marked, untaught, dropped, tools_dropped, quoted, open_ended,
                       self.joined)

    def _whole(self):
        """The Rendered chat. Content parts are given to the template as they are, as transformers gives them; to one that does
        not take them as one text, and `messages` are such from then on."""
        whole, why = self._tried(self.messages)
        lists = [m["content"] for m in self.messages if isinstance(m.get("content"), list)]
        if lists and (whole is None or self._writes_parts() or written(lists, whole.text) < len(lists)):
            joined = list(map(with_joined_parts, self.messages))
            other, why_joined = self._tried(joined)
            if whole is None or self._writes_parts() or other and written(lists, other.text) > written(lists, whole.text):
                # The failure that the template's author wrote says more than the other.
                whole, why = other, why if (why or "").startswith("refuses") else why_joined
                self.messages, self.joined = joined, True
        if whole is None:
            raise Refusal(f"{self.place}: the chat template {why}")
        return whole

    def _tried(self, messages):
        """(Rendered, None) of a chat, or (None, why the template failed)."""
        try:
            return self.template.write(self.chat, messages, tracked=True), None
        except TemplateFailure as error:
            return None, str(error)

    def _writes_parts(self):
        """Whether the template writes content parts themselves, with their braces, rather than their texts."""
        return PROBE in (self._text([probed(m) for m in self.messages]) or "")

    def _refuse_unwritten(self, whole, spans, marked):
        """Refuses a chat whose last answer has a text or calls, and the template writes nothing of them: what is learnt
        would be the end of a turn alone."""
        taught = [i for i in self.indices if self.chat.trained[i]]
        if not taught or taught[-1] != self.indices[-1] and taught[-1] not in dict(spans):
            return
        i = taught[-1]
        message = self.messages[i]
        content = texts_in(message.get("content"))
        said = [t for t in (*content, *map(tool_name, message.get("tool_calls") or [])) if isinstance(t, str) and t.strip()]
        own = [whole[slice(*span)] for j, span in spans if marked or j == i]
        text = "\n".join(own) if own else whole
        seen = any(holds(text, [line]) for part in said for line in part.splitlines())
        if not said or seen and sum(map(len, said)) >= CHANCE:
            return
        # A content may be written in other letters: then not as an empty one is, nor as any other is.
        empty = self._with_content(self.messages, i, "")
        empty[i] = {key: value for key, value in empty[i].items() if key != "tool_calls"}
        others = {self._text(self._with_content(self.messages, i, stand_in)) for stand_in in STAND_INS}
        if self._text(empty) != whole and (seen or len(others) > 1 or None in others):
            return
        where = self.chat.names[i]
        advice = "give another template, or leave such records out"
        if len(others) == 1 and not isinstance(message.get("content"), list):
            parts = [{**m, "content": [{"type": "text", "text": m.get("content") or ""}]} for m in self.messages]
            if STAND_INS[0] in (self._text(self._with_content(parts, i, STAND_INS[0])) or ""):
                advice = 'it takes lists of parts: write each content as [{"type": "text", "text": "..."}]'
        raise Refusal(f"{self.place}: {where}: the chat template writes nothing of this answer; {advice}")

    @staticmethod
    def _with_content(messages, i, text):
        """Messages with another content of message i, which is of the same form."""
        content = messages[i].get("content")
        if isinstance(content, list):
            first = content[0] if content else {"type": "text"}
            text = [{**first, "text": text} if isinstance(first, dict) else text]
        return [*messages[:i], {**messages[i], "content": text}, *messages[i + 1:]]

    # -- marked by the template --

    def _marked(self, spans):
        """(message, span) of each, and answers without any. Whose span one is matters where some are no targets."""
        if len(spans) == len(self.indices):
            return list(zip(self.indices, spans)), 0
        if all(self.chat.trained[i] for i in self.indices):
            return [(self.indices[0], span) for span in spans], 0 if spans else len(self.indices)
        found, before = [], 0
        for i in self.indices:
            prefix = self._write(self.messages[:i + 1], tracked=True)
            count = len(prefix.spans) if prefix and prefix.spans is not None else -1
            if not before <= count <= len(spans):
                raise Refusal(f"{self.place}: the chat template marks {len(spans)} answers of {len(self.indices)}, so it is "
                              f"not plain which is that of {self.chat.names[i]} with weight 0; leave the weights out")
            found += [(i, span) for span in spans[before:count]]
            before = count
        return found, 0

    # -- found by renderings --

    def _write(self, messages, answer=False, tracked=False):
        """The Rendered chat, or None where the template fails: a part of a chat need not be one."""
        try:
            return self.template.write(self.chat, messages, answer, tracked)
        except TemplateFailure:
            return None

    def _text(self, messages, answer=False):
        rendered = self._write(messages, answer)
        return rendered and rendered.text

    def _by_prefixes(self, whole):
        """(message, span) of each answer that is found, and how many are not."""
        found, at, untaught = [], 0, 0
        for i in self.indices:
            last = i + 1 == len(self.messages)
            until = whole if last else self._text(self.messages[:i + 1])
            begin = self._begin(i, until) if until is not None else None
            if begin is not None and whole.startswith(until):
                span = begin, len(until)
            elif begin is not None:
                span = self._rewritten(i, until, begin, whole)
            else:
                span = self._by_stand_ins(i, whole)
            if span is not None and span[0] >= at:
                found.append((i, span))
                at = span[1]
            elif last:
                raise Refusal(f"{self.place}: {self.chat.names[i]}: it is not plain where in the chat template's text this answer "
                              "stands; give a template with {% generation %} blocks, or a tokenizer folder without one")
            else:
                untaught += 1
        return found, untaught

    def _begin(self, i, until):
        """Character of `until`, the chat up to message i, at which its answer begins; None where that is not plain."""
        header = self._text(self.messages[:i], True)
        if header and until.startswith(header):
            return len(header)
        before = self._text(self.messages[:i]) if i else ""
        if before is None or not until.startswith(before):
            return None
        # The template opens an answer with more than this one has, such as thoughts: the answer begins where its content does.
        for message in ({"role": "assistant", "content": self.messages[i].get("content")}, self.messages[i]):
            texts = [self._text(self._with_content([*self.messages[:i], message], i, content)) for content in STAND_INS]
            if None in texts or texts[0] == texts[1]:
                continue
            begin = common(*texts)
            if begin >= len(before) and until.startswith(texts[0][:begin]):
                return begin
        return None

    def _content(self, messages, i, text):
        """Span of the content of message i in `text`, which is what the template writes of `messages`; None where
        stand-ins do not show it."""
        if not messages[i].get("content"):
            return None
        texts = [self._text(self._with_content(messages, i, content)) for content in STAND_INS]
        if None in texts or texts[0] == texts[1]:
            return None
        begin, behind = common(*texts), common_end(*texts)
        if any(len(written) - begin - behind != len(content) for content, written in zip(STAND_INS, texts)):
            return None  # written more than once, or in parts
        end = len(text) - behind
        same = begin <= end and text.startswith(texts[0][:begin]) and text.endswith(texts[0][len(texts[0]) - behind:])
        return (begin, end) if same else None

    def _rewritten(self, i, until, begin, whole):
        """Span in `whole` of an answer that `until` ends with, where the template writes something else around it once
        others follow; None where it writes the answer itself otherwise."""
        content = "".join(texts_in(self.messages[i].get("content"))).strip()
        same, at = common(until, whole), until.find(content, begin) if content else -1
        if at >= 0 and begin <= same < at + len(content):  # the texts part within the content or before it
            return None
        here, there = self._content(self.messages[:i + 1], i, until), self._content(self.messages, i, whole)
        if here is None or there is None or here[0] < begin:
            return None
        lead = until[begin - self._header_length(i, begin, until):here[0]]
        if whole[max(there[0] - len(lead), 0):there[0]] != lead or whole[slice(*there)] != until[slice(*here)]:
            return None
        end, shift = there[1], there[1] - here[1]
        if whole.startswith(until[here[1]:], end):  # the end of the turn is the same
            return there[0] - (here[0] - begin), len(until) + shift
        while (token := self._special_at(whole, end)) and until.startswith(token, end - shift):
            end += len(token)
        while whole[end:end + 1].isspace() and until[end - shift:end - shift + 1] == whole[end]:
            end += 1
        return there[0] - (here[0] - begin), end

    def _header_length(self, i, begin, until):
        """Characters of the header that the template writes before an answer, as far as it is known."""
        before = self._text(self.messages[:i])
        return begin - len(before) if before and until.startswith(before) and len(before) < begin else min(begin, 1)

    def _by_stand_ins(self, i, whole):
        """Span in `whole` of an answer's content and of the special tokens right behind it; None where it is not shown."""
        span = self._content(self.messages, i, whole)
        if span is None:
            return None
        begin, end = span
        while token := self._special_at(whole, end):
            end += len(token)
        return begin, end

    def _is_open_ended(self, text, begin, end):
        """Whether a special token behind text[begin:end] ends it, rather than one in it."""
        return self._special_at(text, end) is not None and not text[begin:end].rstrip().endswith(tuple(self.added))

    def _special_at(self, text, at):
        """The added token that stands in `text` at a character; None where there is none."""
        return next((token for token in self.added if text.startswith(token, at)), None)


# -- what a template leaves out -------------------------------------------------------------------------------

def tool_name(tool):
    """Name of a tool or of a call of one; None where it has none."""
    holder = tool.get("function") if isinstance(tool, dict) and isinstance(tool.get("function"), dict) else tool
    return holder.get("name") if isinstance(holder, dict) else None


def arguments_of(message):
    """Arguments of calls that are written as a text of JSON, as OpenAI's interface gives them."""
    calls = [c.get("function", c) for c in message.get("tool_calls") or []]
    return [c["arguments"] for c in calls if isinstance(c, dict) and isinstance(c.get("arguments"), str) and c["arguments"]]


def texts_of(message):
    """Texts of a message that its template should write: thoughts, content, and names of the tools that it calls."""
    thoughts = next((message[key] for key in REASONING if isinstance(message.get(key), str)), "")
    calls = message.get("tool_calls") or []
    return [t for t in (thoughts, *texts_in(message.get("content")), *map(tool_name, calls)) if isinstance(t, str) and t.strip()]


def holds(text, parts, begin=0):
    """Whether lines of `parts` stand in `text` one behind another, as they are or as JSON writes them."""
    at = begin
    for part in parts:
        for line in filter(None, map(str.strip, part.splitlines())):
            forms = (line, json.dumps(line, ensure_ascii=False)[1:-1], json.dumps(line)[1:-1])
            places = [(p, len(form)) for form in forms if (p := text.find(form, at)) >= 0]
            if not places:
                return False
            place, length = min(places)
            at = place + length
    return True


def written(contents, text):
    """How many of the contents, which are lists of parts, stand in a text."""
    return sum(holds(text, texts_in(content)) for content in contents)


def probed(message):
    """A message with a field PROBE in its content parts."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    return {**message, "content": [{**part, PROBE: PROBE} if isinstance(part, dict) else part for part in parts]}


def dropped_messages(messages, whole, spans):
    """Indices of messages whose text is not, or not whole, in `whole`. `spans`: of answers that are found, by message."""
    gaps, at = [], 0
    for begin, end in sorted(spans.values()):
        gaps.append(whole[at:begin])
        at = end
    gaps = "\0".join([*gaps, whole[at:]])
    dropped = []
    for i, message in enumerate(messages):
        if i in spans:
            begin, end = spans[i]
            # A header may open the thoughts, so that their first line stands before the answer.
            text = whole[max(begin - 32, 0):end]
        else:
            text = whole if message["role"] == "assistant" or not spans else gaps
        if not holds(text, texts_of(message)):
            dropped.append(i)
    return dropped
