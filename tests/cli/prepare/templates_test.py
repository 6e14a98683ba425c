"""Chats by templates in the manner of published families: the tokens are those of transformers, and the targets those of its
generation masks, or, of templates without marks, the answers and the ends of their turns."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import peers  # noqa: E402

peers.run_under_one_with("tokenizers", "jinja2", "transformers")

import re  # noqa: E402

from common import PrepareTest, byte_level, main, sentencepiece, unigram, word_piece  # noqa: E402

MARK, UNMARK = "{% generation %}", "{% endgeneration %}"
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Weather of a city <now>",
                                           "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]
CALL = {"role": "assistant", "content": "", "tool_calls": [
    {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}]}

# Templates in which [[ and ]] stand around an answer: {% generation %} marks in one half of the tests, and nothing in
# the other.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}[[{{ m.content }}<|im_end|>\n]]{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
LLAMA_2 = (
    "{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = '<<SYS>>\n' + m.content + '\n<</SYS>>\n\n' %}"
    "{% elif m.role == 'user' %}{{ bos_token }}[INST] {{ ns.system + m.content | trim }} [/INST]{% set ns.system = '' %}"
    "{% elif m.role == 'assistant' %}[[ {{ m.content | trim }} {{ eos_token }}]]"
    "{% else %}{{ raise_exception('only system, user and assistant') }}{% endif %}{% endfor %}")
LLAMA_3 = (
    "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\nToday: {{ strftime_now('%d %b %Y') }}\n"
    "{% if tools is not none %}Tools:{% for t in tools %}\n{{ t | tojson(indent=2) }}{% endfor %}{% endif %}<|eot_id|>"
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if m.role == 'assistant' %}[[{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content | trim }}"
    "{% endif %}<|eot_id|>]]{% else %}{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}")
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if loop.last or (messages[loop.index:] | selectattr('role', 'equalto', 'user') | list | length == 0) %}"
    "{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% endif %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %}[[{% if m.tool_calls %}[TOOL_CALLS] {{ m.tool_calls | map(attribute='function') | list | tojson }}"
    "{% else %} {{ m.content }}{% endif %}{{ eos_token }}]]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]{% endif %}{% endfor %}")
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.role == 'assistant' %}[[{{ m.content | trim }}<end_of_turn>\n]]{% else %}{{ m.content | trim }}<end_of_turn>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}")
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n"
    "{% if m.role == 'assistant' %}[[{{ m.content }}<|end|>\n]]{% else %}{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}")
ZEPHYR = (
    "{% for m in messages %}\n{% if m['role'] == 'user' %}\n<|user|>\n{{ m['content'] + eos_token }}\n"
    "{% elif m['role'] == 'system' %}\n<|system|>\n{{ m['content'] + eos_token }}\n"
    "{% elif m['role'] == 'assistant' %}\n<|assistant|>\n[[{{ m['content'] + eos_token }}]]{{ '\n' }}{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n<|assistant|>{% endif %}\n{% endfor %}")
QWEN_3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% set thought = m.reasoning_content or '' %}{% set said = m.content or '' %}"
    "{% if '</think>' in said %}{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "[[{% if loop.index0 > ns.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ said }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n]]"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}")
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<\uff5cUser\uff5c>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<\uff5cAssistant\uff5c>[[{{ m.content.split('</think>') | last }}<\uff5cend\u2581of\u2581sentence\uff5c>]]"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<\uff5cAssistant\uff5c><think>\n{% endif %}")
COHERE = (
    "{{ bos_token }}{% if documents %}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{% for d in documents %}{{ d.title }}: {{ d.text }}\n"
    "{% endfor %}<|END_OF_TURN_TOKEN|>{% endif %}{% for m in messages %}<|START_OF_TURN_TOKEN|>"
    "{% if m.role == 'assistant' %}<|CHATBOT_TOKEN|>[[{{ m.content.strip() }}<|END_OF_TURN_TOKEN|>]]"
    "{% else %}<|{{ m.role | upper }}_TOKEN|>{{ m.content.strip() }}<|END_OF_TURN_TOKEN|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}")

SYSTEM, USER, ANSWER = ({"role": r, "content": c} for r, c in (("system", "Be nice"), ("user", "Hello how are you?"),
                                                              ("assistant", "I am fine")))
SHORT = [USER, ANSWER]
LONG = [SYSTEM, USER, ANSWER, {"role": "user", "content": " What is\n\nthe weather? "},
        {"role": "assistant", "content": "<table> caf\u00e9 \U0001f600 yes\n\n"}]
CALLS = [USER, CALL, {"role": "tool", "content": "22 degrees"}, {"role": "assistant", "content": "It is 22 degrees."}]
THOUGHT = {"role": "assistant", "content": "<think>\nmaybe\n</think>\n\nI am fine"}

# name: (template, tokenizer, special tokens, records, targets of the last record)
FAMILIES = {
    "chatml": (CHATML, lambda: byte_level("<|endoftext|>", "<|im_start|>", "<|im_end|>"), {"eos_token": "<|im_end|>"},
               [{"messages": SHORT}, {"messages": LONG}, {"messages": [USER, ANSWER, USER, ANSWER, USER, ANSWER]}],
               "I am fine<|im_end|>\n" * 3),
    "llama 2": (LLAMA_2, lambda: sentencepiece(before="<s>"), {"bos_token": "<s>", "eos_token": "</s>"},
                [{"messages": SHORT}, {"messages": [USER, ANSWER, USER, ANSWER]}, {"messages": LONG}], None),
    "llama 3": (LLAMA_3, lambda: byte_level("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
                                            before="<|begin_of_text|>"),
                {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
                [{"messages": SHORT}, {"messages": LONG}, {"messages": CALLS, "tools": TOOLS}],
                '{"name": "get_weather", "arguments": {"city": "Paris"}}<|eot_id|>It is 22 degrees.<|eot_id|>'),
    "mistral": (MISTRAL, lambda: sentencepiece("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
                                               "[TOOL_RESULTS]", "[/TOOL_RESULTS]", scheme="first", before="<s>"),
                {"bos_token": "<s>", "eos_token": "</s>"},
                [{"messages": SHORT}, {"messages": [USER, ANSWER, USER, ANSWER]}, {"messages": CALLS, "tools": TOOLS}], None),
    "gemma": (GEMMA, lambda: sentencepiece("<bos>", "<start_of_turn>", "<end_of_turn>", scheme="never", before="<bos>"),
              {"bos_token": "<bos>", "eos_token": "<end_of_turn>"},
              [{"messages": SHORT}, {"messages": LONG[1:]}, {"messages": [USER, ANSWER, USER, ANSWER]}], None),
    "phi": (PHI, lambda: byte_level("<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
            {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
            [{"messages": SHORT}, {"messages": LONG}, {"messages": [SYSTEM, *SHORT]}], "I am fine<|end|>\n"),
    "zephyr": (ZEPHYR, lambda: sentencepiece(scheme="always", before="<s>"), {"bos_token": "<s>", "eos_token": "</s>"},
               [{"messages": SHORT}, {"messages": LONG}, {"messages": [SYSTEM, *SHORT]}], None),
    "qwen 3": (QWEN_3, lambda: byte_level("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"),
               {"eos_token": "<|im_end|>", "bos_token": None},
               [{"messages": [USER, THOUGHT]}, {"messages": [USER, {**ANSWER, "reasoning_content": "maybe"}]},
                {"messages": CALLS, "tools": TOOLS}, {"messages": SHORT, "chat_template_kwargs": {"enable_thinking": False}}],
               "I am fine<|im_end|>\n"),
    "deepseek": (DEEPSEEK, lambda: byte_level("<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
                                              "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<think>", "</think>"),
                 {"bos_token": {"__type": "AddedToken", "content": "<\uff5cbegin\u2581of\u2581sentence\uff5c>"},
                  "eos_token": "<\uff5cend\u2581of\u2581sentence\uff5c>"},
                 [{"messages": SHORT}, {"messages": [USER, THOUGHT]}, {"messages": [USER, ANSWER, USER, LONG[-1]]}],
                 "I am fine<\uff5cend\u2581of\u2581sentence\uff5c><table> caf\u00e9 \U0001f600 yes\n\n<\uff5cend\u2581of\u2581sentence\uff5c>"),
    "cohere": (COHERE, lambda: byte_level("<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>",
                                          "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>", trim=False, before="<BOS_TOKEN>"),
               {"bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>"},
               [{"messages": SHORT}, {"messages": LONG}, {"messages": SHORT, "documents": [{"title": "A", "text": "b"}]}],
               "I am fine<|END_OF_TURN_TOKEN|>"),
}


def with_date(tokenizer, date):
    """transformers tells templates the day of the test; here the day that the tool tells them."""
    from transformers.utils import chat_template_utils
    original = chat_template_utils.datetime

    class Fixed(original):
        @classmethod
        def now(cls):
            return original.strptime(date, "%Y-%m-%d")

    chat_template_utils.datetime = Fixed
    return tokenizer


class Families(PrepareTest):
    def reference(self, record, tokenizer, **options):
        return tokenizer.apply_chat_template(record["messages"], tools=record.get("tools"), documents=record.get("documents"),
                                             **record.get("chat_template_kwargs", {}), **options)

    def test_tokens_and_targets_of_marked_templates_are_those_of_transformers(self):
        count = 0
        for name, (template, make, tokens, records, _) in FAMILIES.items():
            template = template.replace("[[", MARK).replace("]]", UNMARK)
            self.tokenizer(make(), template, **tokens)
            pipeline, tokenizer = self.pipeline(), with_date(self.transformers(), "2024-07-26")
            for number, record in enumerate(records):
                with self.subTest(name, record=number):
                    wanted = self.reference(record, tokenizer, return_assistant_tokens_mask=True)
                    prepared = pipeline.prepare(record, "record")
                    self.assertTrue(prepared.targets.marked)
                    self.assertEqual(prepared.encoded.ids, wanted["input_ids"])
                    self.assertEqual(prepared.encoded.mask, wanted["assistant_masks"])
                    self.assertGreater(sum(prepared.encoded.mask), 2)
                    self.assertFalse(prepared.targets.open_ended)
                    count += 1
        self.assertGreaterEqual(count, 30)

    def test_every_kind_of_tokenizer(self):
        template = ("{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>"
                    "{% endgeneration %}{% else %}{{ m.content }}</s>{% endif %}{{ '\n' }}{% endfor %}"
                    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}")
        contents = ("I am fine", " yes\n\n no ", "caf\u00e9 \U0001f600 \ufb01ne na\u00efve", "<table></s>no", "A\u0301 \u00c9", "")
        for make in (lambda: byte_level("</s>"), lambda: byte_level("</s>", trim=False), sentencepiece,
                     lambda: sentencepiece(scheme="always"), lambda: sentencepiece(scheme="first"), unigram,
                     lambda: word_piece("</s>")):
            self.tokenizer(make(), template, eos_token="</s>")
            reference, pipeline = self.transformers(), self.pipeline()
            self.file("model/chat_template.jinja", template.replace(MARK, "").replace(UNMARK, ""))
            unmarked = self.pipeline()
            for content in contents:
                with self.subTest(make, content=content):
                    record = {"messages": [USER, {**ANSWER, "content": content}, USER, ANSWER]}
                    wanted = self.reference(record, reference, return_assistant_tokens_mask=True)
                    encoded, plain = (p.prepare(record, "record").encoded for p in (pipeline, unmarked))
                    self.assertEqual((encoded.ids, encoded.mask), (wanted["input_ids"], wanted["assistant_masks"]))
                    self.assertEqual(plain.ids, wanted["input_ids"])
                    self.assertEqual([i for i, (have, want) in enumerate(zip(plain.mask, encoded.mask)) if want and not have], [])

    def test_filters_and_names_that_templates_are_lent_are_those_of_transformers(self):
        data = {"b": "caf\u00e9 <&>'", "a": [1, None, True, 2.5], "c": {"d": "\n"}}
        record = {"messages": [USER, {**ANSWER, "data": data, "thinking": "hm", "name": None}], "tools": [data], "documents": [data]}
        self.tokenizer(byte_level("<|endoftext|>"), "".join(
            f"{{{{ {expression} }}}}\n" for expression in (
                "messages[1].data | tojson", "messages[1].data | tojson(ensure_ascii=True)", "messages[1].data | tojson(indent=2)",
                "messages[1].data | tojson(separators=(',', ':'))", "messages[1].data | tojson(sort_keys=True)", "tools | tojson(indent=4)",
                "documents | tojson", "messages[1] | tojson", "messages[1].name is defined", "messages[1].reasoning_content", "bos_token",
                "bos_token is defined", "eos_token", "image_token", "pad_token is defined", "add_generation_prompt", "nothing is defined",
                "strftime_now('%d %b %Y, %A %j')", "range(3) | list", "dict(a=1) | tojson", "namespace(x=1).x")) +
            "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i > 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            eos_token="<|endoftext|>", bos_token=None, image_token="<|endoftext|>")
        from preparation.records import normalise
        tokenizer = with_date(self.transformers(), "2025-01-31")
        pipeline = self.pipeline(date="2025-01-31")
        _, chat = normalise(record, "record", templated=True)
        written = pipeline.template().write(chat, chat.messages).text
        self.assertEqual(written, self.reference(record, tokenizer, tokenize=False))
        self.assertIn("caf\u00e9", written)

    def test_tokens_of_templates_without_marks_are_those_of_transformers(self):
        """Targets are those of the same template with marks, or more at the end: what the template writes behind a turn."""
        count = 0
        for name, (template, make, tokens, records, learnt) in FAMILIES.items():
            self.tokenizer(make(), template.replace("[[", "").replace("]]", ""), **tokens)
            pipeline, tokenizer = self.pipeline(), with_date(self.transformers(), "2024-07-26")
            self.file("model/chat_template.jinja", template.replace("[[", MARK).replace("]]", UNMARK))
            marked = self.pipeline()
            for number, record in enumerate(records):
                with self.subTest(name, record=number):
                    wanted = self.reference(record, tokenizer)
                    prepared, like = pipeline.prepare(record, "record"), marked.prepare(record, "record")
                    self.assertFalse(prepared.targets.marked)
                    self.assertEqual(prepared.encoded.ids, wanted["input_ids"])
                    self.assertEqual((prepared.text, prepared.targets.untaught), (like.text, 0))

                    def tokens_with(have, want):
                        return [prepared.text[b:e] for (b, e), *found in zip(
                            prepared.encoded.offsets, prepared.encoded.mask, like.encoded.mask) if found == [have, want]]

                    # With enable_thinking = false the empty thoughts are a part of what the model is given.
                    missing, extra = "".join(tokens_with(0, 1)), tokens_with(1, 0)
                    self.assertEqual(missing, "<think>\n\n</think>\n\n" if "chat_template_kwargs" in record else "")
                    ends = r"\s*(<\|endoftext\|>)?\s*" if name not in ("zephyr",) else r"(\s|<\|assistant\|>)*"
                    self.assertRegex("".join(extra), f"^({ends})*$")
                    count += 1
            if learnt:
                text = "".join(prepared.text[b:e] for b, e in prepared.targets.spans)
                self.assertEqual(re.sub(r"<\|endoftext\|>$", "", text), learnt)
        self.assertGreaterEqual(count, 30)

    def test_content_parts_are_given_as_they_are(self):
        """Templates that work on each part write what transformers does; those that take texts alone are given one text."""
        loop = "{% for c in m.content %}{% if c.type == 'text' %}{{ TEXT }}{% endif %}{% endfor %}"
        either = "{% if m.content is string %}{{ m.content }}{% else %}{{ PARTS }}{% endif %}"
        chatml = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}[[CONTENT<|im_end|>\n]]{% else %}CONTENT"
                  "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
        smol = ("{% for m in messages %}{{ m.role | capitalize }}{% if m.content[0].type == 'image' %}:{% else %}: {% endif %}"
                "[[" + loop.replace("TEXT", "c.text") + "<|im_end|>]]\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}")
        parts = [{"type": "text", "text": " How\nare "}, {"type": "text", "text": "you?"}]
        answer = [{"type": "text", "text": "I am"}, {"type": "text", "text": " fine "}]
        chats = [[{**USER, "content": parts}, {**ANSWER, "content": answer}, {**USER, "content": parts[1:]}, {**ANSWER, "content": answer[:1]}],
                 [{**USER, "content": parts[:1]}, ANSWER], [USER, {**ANSWER, "content": answer}],
                 [SYSTEM, {**USER, "content": parts}, {**ANSWER, "content": answer, "weight": 0}, USER, ANSWER]]
        for content, learnt in [(loop.replace("TEXT", "c.text"), "I am fine "), (loop.replace("TEXT", "c.text | trim"), "I amfine"),
                                (either.replace("PARTS", "m.content | map(attribute='text') | join('\n')"), "I am\n fine "),
                                (either.replace("PARTS", "m.content[0].text ~ '+' ~ m.content[-1].text"), "I am+ fine "), (smol, "I am fine ")]:
            template = content if "messages" in content else chatml.replace("CONTENT", content)
            for marks in ((MARK, UNMARK), ("", "")):
                if marks[0] and template == smol:  # it marks what the user says too
                    continue
                self.tokenizer(byte_level("<|im_start|>", "<|im_end|>"), template.replace("[[", marks[0]).replace("]]", marks[1]))
                pipeline, tokenizer = self.pipeline(), self.transformers()
                for number, chat in enumerate(chats):
                    if number and "is string" not in template:
                        continue  # texts are not written by it
                    with self.subTest(content, marks=marks, chat=number):
                        prepared = pipeline.prepare({"messages": chat}, "record")
                        self.assertEqual(prepared.encoded.ids, tokenizer.apply_chat_template(chat)["input_ids"])
                        spans = [prepared.text[b:e].removesuffix("\n") for b, e in prepared.targets.spans]
                        space = " " * (template == smol)
                        wanted = {0: 2, 1: 1, 2: 1, 3: 1}[number]
                        self.assertEqual(len(spans), wanted)
                        if number in (0, 2):
                            self.assertEqual(spans[0], f"{space}{learnt}<|im_end|>")
                        self.assertEqual((prepared.targets.joined, prepared.targets.untaught), (False, 0))
        for content in ("m.content", "m.content | trim", "'' + m.content", "m.content.strip()", "m.content | string", "m.content | tojson"):
            self.tokenizer(byte_level("<|im_start|>", "<|im_end|>"), chatml.replace("CONTENT", f"{{{{ {content} }}}}").replace("[[", "")
                           .replace("]]", ""))
            texts = [{**m, "content": "".join(p["text"] for p in m["content"])} for m in chats[0]]
            prepared = self.pipeline().prepare({"messages": chats[0]}, "record")
            self.assertEqual(prepared.text, self.transformers().apply_chat_template(texts, tokenize=False))
            self.assertEqual((prepared.targets.joined, len(prepared.targets.spans)), (True, 2))


if __name__ == "__main__":
    main()
