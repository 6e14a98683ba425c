"""Records of preferences: two answers to one prompt, of which one was preferred. Each becomes two records, alike up to their
answers, of which the answers alone are targets. What may be written is what TRL takes.
"""
from collections import namedtuple

from .errors import Refusal
from .records import Prompt, chat, described, string, texts_in
from .templates import REASONING

# chosen, rejected: each a Prompt or a Chat.
Pair = namedtuple("Pair", "chosen rejected")
SIDES = Pair._fields


def preference(record, place):
    """The Pair of a record with fields chosen and rejected, and with a prompt or without one."""
    for side in SIDES:
        if side not in record:
            raise Refusal(f"{place}: field {side} is missing; a preference has both chosen and rejected")
    chosen, rejected = (record[side] for side in SIDES)
    if isinstance(chosen, list) != isinstance(rejected, list):
        raise Refusal(f"{place}: chosen is {described(chosen)}, rejected is {described(rejected)}; write both as text, or both as "
                      "messages")
    if isinstance(chosen, list):
        return chats(record, place)
    for name in ("tools", "documents"):
        if record.get(name):
            raise Refusal(f"{place}: field {name}: only chats have it; write prompt, chosen and rejected as messages")
    return texts(record, *(string(record[side], side, place) for side in SIDES), place)


def refuse_equal(chosen, rejected, place):
    """Refuses a preference between equal answers."""
    if chosen == rejected:
        raise Refusal(f"{place}: chosen and rejected are the same; leave the record out")


def refuse_empty(side, place):
    """Refuses an answer without a text."""
    raise Refusal(f"{place}: field {side}: the answer is empty; leave the record out, or write the answer")


# -- texts ----------------------------------------------------------------------------------------------------

def texts(record, chosen, rejected, place):
    """A Pair of Prompts. Without a prompt that is the common beginning of both texts, but for a space before the answers."""
    refuse_equal(chosen, rejected, place)
    if "prompt" in record:
        prompt = string(record["prompt"], "prompt", place)
    else:
        prompt = common_beginning(chosen, rejected)
        chosen, rejected = chosen[len(prompt):], rejected[len(prompt):]
    for side, answer in zip(SIDES, (chosen, rejected)):
        if not answer.strip():
            refuse_empty(side, place)
    return Pair(*(Prompt([(prompt, False), (answer, True)]) for answer in (chosen, rejected)))


def common_beginning(one, other):
    """The common beginning of two texts that differ, without a space at its end."""
    length = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
    return one[:length - (one[:length].endswith(" "))]


# -- chats ----------------------------------------------------------------------------------------------------

def chats(record, place):
    """A Pair of Chats. With a prompt of messages these come before each answer; else the answers are whole conversations, and
    their common beginning is the prompt."""
    refuse_equal(record["chosen"], record["rejected"], place)
    given = record.get("prompt")
    own = {key: value for key, value in record.items() if key != "system" or not isinstance(given, list)}
    answers = [chat(own, record[side], side, place) for side in SIDES]
    if isinstance(given, list):
        first = chat(record, given, "prompt", place)
        return Pair(*(joined(first, answer, place, side) for side, answer in zip(SIDES, answers)))
    chosen, rejected = (answer.messages for answer in answers)
    common = next((i for i, (a, b) in enumerate(zip(chosen, rejected)) if a != b), min(len(chosen), len(rejected)))
    if given is not None:
        require_prompt(string(given, "prompt", place), chosen[:common], place)
    return Pair(*(answered(answer, common, place, side) for side, answer in zip(SIDES, answers)))


def require_prompt(text, messages, place):
    """Refuses a prompt of text that is in none of the messages with which both conversations begin."""
    if not any(text.strip() == "".join(texts_in(message.get("content"))).strip() for message in messages):
        raise Refusal(f"{place}: prompt is text, chosen and rejected are messages, and none of their common ones says it; write all "
                      "as text, or the prompt as messages")


def joined(prompt, answer, place, side):
    """A Chat of a prompt and an answer."""
    whole = prompt._replace(messages=prompt.messages + answer.messages, names=prompt.names + answer.names,
                            trained=prompt.trained + answer.trained)
    return answered(whole, len(prompt.messages), place, side)


def answered(whole, begin, place, side):
    """A Chat of which only what the assistant says from message `begin` on is learnt; refuses where that is nothing."""
    said = [m for m, trained in zip(whole.messages[begin:], whole.trained[begin:]) if trained]
    if not any(m.get("tool_calls") or any(m.get(key) for key in REASONING) or
               "".join(texts_in(m.get("content"))).strip() for m in said):
        refuse_empty(side, place)
    return whole._replace(trained=[False] * begin + whole.trained[begin:])
