"""Formats of records: each is recognised by its fields and becomes a Text, a Prompt or a Chat.

Fields that change what is learnt are honoured or refused by name; every other field is taken for metadata. A null field is
as if it were not there.
"""
import json
from collections import namedtuple

from .errors import Refusal
from .templates import REASONING

FORMATS = ("auto", "sharegpt", "alpaca", "messages", "prompt", "text", "preference")

Text = namedtuple("Text", "text")
# pieces: (text, whether it is learnt), in order.
Prompt = namedtuple("Prompt", "pieces")
# messages: as transformers takes them; a content may be a list of parts. names: where each stands in the record, such as
# messages[0]. trained: whether each is learnt, where it is the assistant's. tools, documents: lists or None. variables: more
# that the record gives to the template.
Chat = namedtuple("Chat", "messages names trained tools documents variables")

# Spellings of roles, in lower case; in `messages` a role that is not here is left to the template.
ROLES = {"human": "user", "user": "user", "prompter": "user", "usr": "user", "customer": "user",
         "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
         "ai": "assistant", "bard": "assistant", "bing": "assistant", "claude": "assistant",
         "system": "system", "developer": "developer",
         "tool": "tool", "observation": "tool", "tool_response": "tool", "function_response": "tool",
         "tool_output": "tool", "tool_result": "tool", "ipython": "ipython", "function": "function"}
KNOWN_ROLES = tuple(dict.fromkeys(ROLES.values()))
CALLS = ("function_call", "tool_call", "tool_calls")  # roles of an assistant that calls tools
WEIGHTS = ("weight", "train", "training", "trainable", "loss")
# Fields of a record that mean something that is not done here: why, and what to do.
REFUSED = {
    "images": "pictures", "image": "pictures", "videos": "pictures", "video": "pictures", "audios": "sound", "audio": "sound",
    "chosen_messages": "preferences", "rejected_messages": "preferences",
    "kto_tag": "preferences", "input_ids": "token ids", "loss_mask": "masks of tokens",
}
TEXTS = ("text", "input_text", "output_text")  # types of content parts

# The prompt that Alpaca's data are published with.
ALPACA = "Below is an instruction that describes a task{more}. Write a response that appropriately completes the request."
ALPACA_INPUT = ", paired with an input that provides further context"


def formats_of(record):
    """Formats that a record's fields fit, the more specific first."""
    found = []
    if "messages" in record:
        found.append("messages")
    if "conversations" in record or "conversation" in record:
        found.append("sharegpt")
    if "instruction" in record and ("output" in record or "response" in record):
        found.append("alpaca")
    if "prompt" in record and "completion" in record:
        found.append("prompt")
    if "text" in record:
        found.append("text")
    if "chosen" in record or "rejected" in record:
        found.append("preference")
    return found


def recognise(record, place, wanted="auto"):
    """The format of a record, of FORMATS without auto; refuses where none or more than one fits."""
    found = formats_of(record)
    if wanted != "auto":
        if wanted not in found:
            raise Refusal(f"{place}: --format {wanted}, and the record has {fields(record)}; give another --format")
        return wanted
    if len(found) == 2 and found[1] == "text" and is_written_out(record, found[0]):
        found.pop()  # the column `text` of Alpaca's data: the same once more
    if not found:
        holder = next((key for key, value in record.items() if isinstance(value, list) and value and
                       isinstance(value[0], dict) and formats_of(value[0])), None)
        if holder is not None:
            raise Refusal(f"{place}: the records are a list in field {holder!r}; write that list alone: "
                          f"jq '.[{json.dumps(holder)}]' FILE")
        raise Refusal(f'{place}: a record needs "messages", "conversations", "instruction" and "output", "prompt" and '
                      f'"completion", "text", or "chosen" and "rejected"; this one has {fields(record)}; rename them so; --format NAME says which form is meant')
    if len(found) > 1:
        raise Refusal(f"{place}: the record fits the formats {' and '.join(found)}; say which by --format {found[0]} or "
                      f"--format {found[1]}")
    return found[0]


def is_written_out(record, form):
    """Whether the field text of a record is an Alpaca record in one text."""
    parts = [record.get(key) for key in ("instruction", "input", "output") if record.get(key)]
    text = record["text"]
    return form == "alpaca" and isinstance(text, str) and all(isinstance(p, str) and p.strip() in text for p in parts)


def fields(record):
    """Names of a record's fields, for an error."""
    names = [repr(str(key)[:40]) for key in record]
    return (" ".join(names[:8]) + (" ..." if len(names) > 8 else "")) or "no field"


def normalise(raw, place, wanted="auto", templated=False):
    """(format, Text, Prompt or Chat) of a record as it was read; a preference's fields are left for preferences.py. `templated`:
    whether there is a template for chats, which Alpaca's records then become."""
    if not isinstance(raw, dict):
        raise Refusal(f"{place}: a record is an object, {{...}}, and this is {described(raw)}; write one record a line")
    record = {key: value for key, value in raw.items() if value is not None}
    refuse_fields(record, place)
    form = recognise(record, place, wanted)
    if form == "text":
        return form, Text(string(record["text"], "text", place))
    if form == "prompt":
        return form, prompt(record, place)
    if form == "alpaca":
        return form, alpaca(record, place, templated)
    if form == "preference":
        return form, record
    if form == "messages":
        return form, chat(record, record["messages"], "messages", place)
    name = "conversations" if "conversations" in record else "conversation"
    return form, chat(record, record[name], name, place)


def refuse_fields(record, place):
    """Refuses fields that ask for what is not done here."""
    for name, what in REFUSED.items():
        if record.get(name) not in (None, [], "", {}):
            raise Refusal(f"{place}: field {name}: {what} are not learnt; leave such records out, or the field")
    for name in WEIGHTS:
        value = record.get(name)
        if value is False or name == "weight" and isinstance(value, (int, float)) and value != 1:
            raise Refusal(f"{place}: field {name}: {json.dumps(value)} of a whole record is not done; leave the record out, "
                          "or repeat it")


def string(value, name, place):
    """A field's text; refuses every other value."""
    if not isinstance(value, str):
        raise Refusal(f"{place}: field {name}: text was expected, and it is {described(value)}; write it as text")
    return value


def described(value):
    """A value's kind, in words of JSON."""
    kinds = {dict: "an object", list: "a list", bool: "true or false", type(None): "null", str: "text", int: "a number",
             float: "a number", bytes: "bytes"}
    return kinds.get(type(value), f"a {type(value).__name__}")


# -- prompts and instructions ---------------------------------------------------------------------------------

def prompt(record, place):
    """A Prompt of two texts, or a Chat of two lists of messages."""
    given, answer = record["prompt"], record["completion"]
    if isinstance(given, list) and isinstance(answer, list):
        first, second = chat(record, given, "prompt", place), chat({}, answer, "completion", place)
        # Answers of the prompt are read only.
        trained = [False] * len(first.messages) + second.trained
        return first._replace(messages=first.messages + second.messages, names=first.names + second.names, trained=trained)
    if isinstance(given, list) != isinstance(answer, list):
        raise Refusal(f"{place}: prompt is {described(given)}, completion is {described(answer)}; write both as text, or both "
                      "as messages")
    for name in ("tools", "documents"):
        if record.get(name):
            raise Refusal(f"{place}: field {name}: only chats have it; write prompt and completion as messages")
    return Prompt([(string(given, "prompt", place), False), (string(answer, "completion", place), True)])


def alpaca(record, place, templated):
    """A chat where there is a template; else the published prompt, turns of `history` before it in the same form."""
    more = record.get("input", record.get("context", ""))
    instruction, more = string(record["instruction"], "instruction", place), string(more, "input", place)
    output = string(record.get("output", record.get("response")), "output", place)
    system, history = string(record.get("system", ""), "system", place), record.get("history", [])
    if not isinstance(history, list) or any(not isinstance(turn, (list, tuple)) or len(turn) != 2 or
                                            not all(isinstance(t, str) for t in turn) for turn in history):
        raise Refusal(f"{place}: field history: a list of pairs [instruction, answer] was expected; write it so")
    if templated:
        pairs = [*history, (f"{instruction}\n{more}" if more else instruction, output)]
        messages = [{"role": "system", "content": system}] if system else []
        names = ["system"] if system else []
        for number, (question, answer) in enumerate(pairs):
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            turn = f"history[{number}]"
            names += [f"{turn}[0]", f"{turn}[1]"] if number < len(history) else ["instruction", "output"]
        return chat({"tools": record.get("tools")}, messages, "messages", place)._replace(names=names)
    if record.get("tools"):
        raise Refusal(f"{place}: field tools: the tokenizer brings no chat template to write them; give one that does")
    pieces, turns = [], [*((question, "", answer) for question, answer in history), (instruction, more, output)]
    for number, (question, given, answer) in enumerate(turns):
        head = system or ALPACA.format(more=ALPACA_INPUT if given else "")
        given = f"### Input:\n{given}\n\n" if given else ""
        pieces.append(("\n\n" * (number > 0) + f"{head}\n\n### Instruction:\n{question}\n\n{given}### Response:\n", False))
        pieces.append((answer, True))
    return Prompt(pieces)


# -- chats ----------------------------------------------------------------------------------------------------

def chat(record, messages, name, place):
    """A Chat of a record's messages, which stand in its field `name`."""
    if not isinstance(messages, list) or not messages:
        raise Refusal(f"{place}: field {name}: a list of messages was expected; write "
                      '[{"role": "user", "content": "..."}, ...]')
    taken = [message_of(m, f"{name}[{i}]", place) for i, m in enumerate(messages)]
    names, trained = [f"{name}[{i}]" for i in range(len(taken))], [t for _, t in taken]
    taken = [m for m, _ in taken]
    system = record.get("system")
    if system:
        if taken[0]["role"] == "system":
            raise Refusal(f"{place}: field system beside a message of the system; leave one of them out")
        taken.insert(0, {"role": "system", "content": string(system, "system", place)})
        names.insert(0, "system")
        trained.insert(0, False)
    variables = record.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict) or {"messages", "tools", "documents", "add_generation_prompt"} & set(variables):
        raise Refusal(f"{place}: field chat_template_kwargs: an object of other variables was expected; mend it")
    if record.get("functions"):
        raise Refusal(f"{place}: field functions: an older form of tools; write it as tools")
    tools, documents = (objects(record.get(name), name, place) for name in ("tools", "documents"))
    return Chat(taken, names, trained, tools, documents, variables)


def objects(value, name, place):
    """A list of objects, which may be written as a text of JSON; None where it is empty."""
    if isinstance(value, str):
        value = parsed(value, name, place) if value.strip() else None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise Refusal(f"{place}: field {name}: a list of objects was expected; write it so")
    return value


def parsed(text, name, place):
    """The value of a text of JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"{place}: field {name}: not JSON ({error or 'nested too deep'}); mend it") from None


def message_of(given, name, place):
    """A message as transformers takes it, and whether it is learnt."""
    if not isinstance(given, dict):
        raise Refusal(f'{place}: {name} is {described(given)}; a message is {{"role": "...", "content": "..."}}')
    message = dict(given)
    if "from" in message and "role" not in message:
        message["role"] = message.pop("from")
    if "value" in message and "content" not in message:
        message["content"] = message.pop("value")
    role = message.get("role")
    if not isinstance(role, str) or not role.strip():
        raise Refusal(f"{place}: {name}.role is {described(role)}; name who speaks")
    spelling, shared = role.strip().lower(), "from" in given
    trained = weight_of(message, name, place)
    if spelling in CALLS:
        message["role"], message["tool_calls"] = "assistant", calls_in(message.pop("content", None), name, place)
    elif spelling in ROLES:
        message["role"] = ROLES[spelling]
    elif shared:
        raise Refusal(f"{place}: {name}.from is {role!r}; write human, gpt, system, tool or function_call")
    refuse_parts(message, name, place)
    if message["role"] != "assistant":
        if trained:
            raise Refusal(f"{place}: {name}: a weight on what the {message['role']} says; only the assistant's is learnt")
        return message, False
    return message, trained is not False


def weight_of(message, name, place):
    """Whether a message is said to be learnt, or None; takes the fields that say so out of it."""
    said = {}
    for field in WEIGHTS:
        value = message.pop(field, None)
        if value is not None:
            if not isinstance(value, (bool, int, float)) or value not in (0, 1):
                raise Refusal(f"{place}: {name}.{field} is {json.dumps(value)[:40]}; only 0 and 1 are known")
            said[field] = bool(value)
    for field in ("train_detail", "training_detail", "mask"):
        if message.get(field) is not None:
            raise Refusal(f"{place}: {name}.{field} is not known; write \"weight\": 0 for what is not learnt")
    if len(set(said.values())) > 1:
        raise Refusal(f"{place}: {name}: {' and '.join(said)} say opposite things; leave one of them out")
    return next(iter(said.values()), None)


def calls_in(text, name, place):
    """tool_calls of a ShareGPT message: one call or a list of them, as JSON."""
    calls = parsed(text, name, place) if isinstance(text, str) else text
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(c, dict) and tool_name(c) for c in calls):
        raise Refusal(f'{place}: {name}: a call was expected, {{"name": "...", "arguments": {{...}}}}; write it so')
    return [c if "function" in c else {"type": "function", "function": c} for c in calls]


def tool_name(call):
    """Name of the tool that a call names; None where it names none."""
    holder = call["function"] if isinstance(call.get("function"), dict) else call
    return holder.get("name") if isinstance(holder.get("name"), str) else None


def refuse_parts(message, name, place):
    """Refuses contents that are no text, nor a list of parts that are, and calls that are not lists."""
    if message.get("function_call") is not None:
        if message.get("tool_calls"):
            raise Refusal(f"{place}: {name} has function_call and tool_calls; leave one of them out")
        message["tool_calls"] = [{"type": "function", "function": message["function_call"]}]
    message.pop("function_call", None)
    if isinstance(message.get("tool_calls"), str):
        message["tool_calls"] = parsed(message["tool_calls"], f"{name}.tool_calls", place) or None
    calls = message.get("tool_calls")
    if calls is not None and (not isinstance(calls, list) or not all(isinstance(c, dict) and tool_name(c) for c in calls)):
        raise Refusal(f"{place}: {name}.tool_calls: a list of calls was expected; write "
                      '[{"type": "function", "function": {"name": "...", "arguments": {...}}}]')
    if calls == []:
        del message["tool_calls"]
    for field in ("audio", "refusal", "images", "image"):
        if message.get(field):
            raise Refusal(f"{place}: {name}.{field} is not learnt; leave such records out")
    content = message.get("content")
    if isinstance(content, list):
        for i, part in enumerate(content):
            refuse_part(part, f"{name}.content[{i}]", place)
    elif content is None and not message.get("tool_calls"):
        if not any(message.get(key) for key in REASONING):
            raise Refusal(f"{place}: {name}.content is null; write a text there, or leave the message out")
    elif content is not None and not isinstance(content, str):
        raise Refusal(f"{place}: {name}.content is {described(content)}; write it as text")


def refuse_part(part, name, place):
    """Refuses a content part that is no text."""
    kind = part.get("type", "text") if isinstance(part, dict) else None
    if isinstance(part, str) or kind in TEXTS and isinstance(part.get("text"), str):
        return
    what = f"of type {kind}" if isinstance(kind, str) else described(part)
    raise Refusal(f"{place}: {name} is {what}; only text is learnt: leave such records out")


def texts_in(content):
    """Texts of a message's content, which is a text, a list of parts, or None."""
    parts = content if isinstance(content, list) else [content or ""]
    return [part if isinstance(part, str) else part["text"] for part in parts]


def with_joined_parts(message):
    """A message with its content parts as one text."""
    return {**message, "content": "".join(texts_in(message["content"]))} if isinstance(message.get("content"), list) else message
