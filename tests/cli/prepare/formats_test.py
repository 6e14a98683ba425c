"""Records in the formats that people have: what each becomes, what is learnt of it, and what is refused by line and field."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import peers  # noqa: E402

peers.run_under_one_with("tokenizers", "jinja2")

import json  # noqa: E402

from common import PrepareTest, byte_level, main  # noqa: E402
from program import ProgramTest  # noqa: E402

TEMPLATE = (
    "{% if tools %}{% for t in tools %}({{ t.name or t.function.name }}){% endfor %}{% endif %}{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}<{{ m.reasoning_content }}>{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}!{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}")
USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
CALL = {"type": "function", "function": {"name": "get", "arguments": {"a": 1}}}


class Formats(PrepareTest):
    def setUp(self):
        super().setUp()
        self.tokenizer(byte_level("<|endoftext|>"), TEMPLATE, eos_token="<|endoftext|>")

    def without_template(self):
        (self.model / "chat_template.jinja").unlink()

    def learnt(self, record, **options):
        """Format, text, and what of it is learnt."""
        prepared = self.pipeline(**options).prepare(record, "r")
        spans = prepared.targets.spans if prepared.targets else None
        if spans is None:
            tokens = zip(prepared.encoded.offsets, prepared.encoded.mask)
            return prepared.form, prepared.text, "".join(prepared.text[b:e] for (b, e), m in tokens if m)
        return prepared.form, prepared.text, "|".join(prepared.text[b:e] for b, e in spans)

    def test_messages(self):
        plain = "[user]hi![assistant]yo!"
        for record, text, learnt in [
                ({"messages": [USER, ANSWER]}, plain, "yo!"),
                ({"messages": [USER, ANSWER, USER, ANSWER]}, plain * 2, "yo!|yo!"),
                ({"messages": [{**USER, "content": [{"type": "text", "text": "h"}, {"type": "input_text", "text": "i"}]}, ANSWER]}, plain,
                 "yo!"),
                ({"messages": [{"from": "human", "value": "hi"}, {"role": "Assistant", "content": "yo"}]}, plain, "yo!"),
                ({"messages": [USER, {**ANSWER, "weight": 0}, USER, {**ANSWER, "weight": 1}]}, plain * 2, "yo!"),
                ({"messages": [USER, {**ANSWER, "train": False}, USER, ANSWER]}, plain * 2, "yo!"),
                ({"messages": [USER, {**ANSWER, "loss": False}, {**USER, "weight": 0}, {**ANSWER, "training": True}]}, plain * 2, "yo!"),
                ({"messages": [USER, {**ANSWER, "tool_calls": None, "name": None}], "tools": None, "documents": None}, plain, "yo!"),
                ({"messages": [USER, ANSWER], "tools": []}, plain, "yo!"),
                ({"messages": [USER, ANSWER], "tools": [{"name": "get"}]}, "(get)" + plain, "yo!"),
                ({"messages": [USER, ANSWER], "tools": '[{"name": "get"}]'}, "(get)" + plain, "yo!"),
                ({"system": "S", "messages": [USER, ANSWER]}, "[system]S!" + plain, "yo!"),
                ({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]}, '[user]hi![assistant]get({"a": 1})!',
                 'get({"a": 1})!'),
                ({"messages": [USER, {"role": "assistant", "content": "", "function_call": CALL["function"]}]},
                 '[user]hi![assistant]get({"a": 1})!', 'get({"a": 1})!'),
                ({"messages": [USER, {**ANSWER, "thinking": "hm"}]}, "[user]hi![assistant]<hm>yo!", "<hm>yo!"),
                ({"messages": [{"role": "critic", "content": "x"}, USER, ANSWER]}, "[critic]x!" + plain, "yo!"),
                ({"messages": [ANSWER, USER, ANSWER]}, "[assistant]yo!" + plain, "yo!|yo!"),
                ({"messages": [USER, ANSWER, ANSWER]}, plain + "[assistant]yo!", "yo!|yo!"),
                ({"prompt": "x", "prompt_id": "1", "source": "web", "score": 0.5, "loss": 2.5, "messages": [USER, ANSWER]}, plain, "yo!")]:
            with self.subTest(record):
                self.assertEqual(self.learnt(record), ("messages", text, learnt))

    def test_sharegpt(self):
        plain = "[user]hi![assistant]yo!"
        for human in ("human", "user", "Human", "prompter"):
            for gpt in ("gpt", "assistant", "chatgpt", "bot", "model", "GPT", "ai"):
                record = {"id": "1", "conversations": [{"from": human, "value": "hi"}, {"from": gpt, "value": "yo"}]}
                self.assertEqual(self.learnt(record), ("sharegpt", plain, "yo!"))
        for record, text, learnt in [
                ({"conversations": [USER, ANSWER]}, plain, "yo!"),
                ({"conversation": [USER, ANSWER]}, plain, "yo!"),
                ({"system": "S", "conversations": [USER, ANSWER]}, "[system]S!" + plain, "yo!"),
                ({"system": "", "tools": "", "conversations": [USER, ANSWER]}, plain, "yo!"),
                ({"tools": json.dumps([{"name": "get"}]), "conversations": [
                    {"from": "human", "value": "hi"}, {"from": "function_call", "value": '{"name": "get", "arguments": {"a": 1}}'},
                    {"from": "observation", "value": "2"}, {"from": "gpt", "value": "yo"}]},
                 '(get)[user]hi![assistant]get({"a": 1})![tool]2![assistant]yo!', 'get({"a": 1})!|yo!')]:
            with self.subTest(record):
                self.assertEqual(self.learnt(record), ("sharegpt", text, learnt))

    def test_alpaca(self):
        for record, text, learnt in [
                ({"instruction": "do", "input": "", "output": "yo"}, "[user]do![assistant]yo!", "yo!"),
                ({"instruction": "do", "input": "x", "output": "yo"}, "[user]do\nx![assistant]yo!", "yo!"),
                ({"instruction": "do", "input": None, "output": "yo", "system": "S", "history": [["a", "b"]]},
                 "[system]S![user]a![assistant]b![user]do![assistant]yo!", "b!|yo!"),
                ({"instruction": "do", "context": "x", "response": "yo", "category": "qa"}, "[user]do\nx![assistant]yo!", "yo!"),
                ({"instruction": "do", "input": "x", "output": "yo", "text": "written: do x yo"}, "[user]do\nx![assistant]yo!", "yo!")]:
            with self.subTest(record):
                self.assertEqual(self.learnt(record), ("alpaca", text, learnt))
        self.without_template()
        head = "Below is an instruction that describes a task"
        tail = ". Write a response that appropriately completes the request.\n\n### Instruction:\ndo\n\n"
        for record, text, learnt in [
                ({"instruction": "do", "input": "", "output": "yo"}, f"{head}{tail}### Response:\nyo", "yo"),
                ({"instruction": "do", "input": "x", "output": "yo"},
                 f"{head}, paired with an input that provides further context{tail}### Input:\nx\n\n### Response:\nyo", "yo"),
                ({"instruction": "do", "output": "yo", "system": "S", "history": [["do", "b"]]},
                 "S\n\n### Instruction:\ndo\n\n### Response:\nb\n\nS\n\n### Instruction:\ndo\n\n### Response:\nyo", "byo")]:
            with self.subTest(record):
                self.assertEqual(self.learnt(record), ("alpaca", text, learnt))

    def test_prompts_and_texts(self):
        plain = "[user]hi![assistant]yo!"
        for record, found in [
                ({"prompt": "ab", "completion": " cd"}, ("prompt", "ab cd", " cd")),
                ({"prompt": "", "completion": "cd"}, ("prompt", "cd", "cd")),
                ({"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}, ("prompt", plain * 2, "yo!")),
                ({"prompt": [USER], "completion": [ANSWER], "tools": [{"name": "get"}]}, ("prompt", "(get)" + plain, "yo!")),
                ({"text": "ab", "meta": {"a": 1}}, ("text", "ab", "ab")),
                ({"text": "ab", "messages": None, "prompt": None}, ("text", "ab", "ab"))]:
            with self.subTest(record):
                self.assertEqual(self.learnt(record), found)
        both = {"text": "ab", "messages": [USER, ANSWER]}
        self.assertEqual(self.learnt(both, form="text"), ("text", "ab", "ab"))
        self.assertEqual(self.learnt(both, form="messages"), ("messages", plain, "yo!"))

    def test_a_chat_without_a_template(self):
        self.without_template()
        record = {"messages": [USER, ANSWER, USER, {**ANSWER, "weight": 0}]}
        text = "<|user|>\nhi\n<|assistant|>\nyo\n"
        self.assertEqual(self.learnt(record), ("messages", text * 2, "yo\n"))
        self.succeed(self.prepare(self.records(record, {"prompt": "12", "completion": "345"}, {"text": "plain"})))
        self.assertEqual(self.text_and_targets(), [f"{text * 2}<|endoftext|>12345<|endoftext|>plain<|endoftext|>",
                                                   "yo\n345<|endoftext|>plain<|endoftext|>"])

    def test_rows(self):
        chat = self.records({"prompt": "12", "completion": "345"}, {"text": "plain words"}, {"prompt": "123456789", "completion": "a"})
        result = self.succeed(self.prepare("--layout", "rows", "--row-length", "6", chat))
        ids, mask, description = self.written()
        self.assertEqual((len(ids), description["row_length"], description["records"]), (12, 6, 2))
        self.assertEqual(mask[:6], [0, 0, 1, 1, 1, 1])
        self.assertIn("1 records left out: without any target", result.stderr)
        self.assertRegex(result.stderr, r"\d records cut at --row-length")
        # The cut of the first record is shown too; and where no target is left, what to do.
        self.assertNotIn("cut here", result.stdout)
        chat = self.records({"prompt": "123456", "completion": "a+"}, {"text": "b"})
        result = self.succeed(self.prepare("--layout", "rows", "--row-length", "7", chat))
        self.assertIn("  TARGET  | a\n  (cut here by --row-length 7: 2 tokens behind it, 2 of them targets)\n", result.stdout)
        result = self.succeed(self.prepare("--layout", "rows", "--row-length", "3", chat))
        self.assertIn("  context | 123\n  (cut here by --row-length 3: 6 tokens behind it, 3 of them targets; without a target before it, "
                      "the record is left out)\n", result.stdout)
        self.assertIn("1 records left out: without any target, 1 of them as their targets stand beyond --row-length", result.stderr)
        for path in self.root.glob("out.*"):
            path.unlink()
        self.refused(self.prepare("--layout", "rows", "--row-length", "3", self.records({"prompt": "123456", "completion": "a"})),
                     "--row-length 3: no record has a target within it, and the longest record has 8 tokens; give a larger one")

    def test_roles_that_no_one_knows_are_told(self):
        chat = [USER, {"role": "asistant", "content": "b"}, {"role": "Narrator", "content": "c"}, ANSWER]
        told = "2 messages have a role that is none of user assistant system developer tool ipython function: their text is context, never learnt "
        for lines in ([{"messages": [USER, ANSWER]}, {"messages": chat}], [{"text": "a"}, {"messages": chat}]):
            result = self.succeed(self.prepare(self.records(*lines)))
            self.assertIn(f'{told}(the first: {self.root}/data.jsonl, line 2: messages[1], role "asistant")\n', result.stderr)
            self.without_template() if self.model.joinpath("chat_template.jinja").exists() else None
        self.assertNotIn("a role", self.succeed(self.prepare(self.records({"messages": [USER, ANSWER]}))).stderr)

    # -- what a template does with answers --------------------------------------------------------------------

    def spans(self, template, *messages, **record):
        """Learnt texts of a chat by a template, how many answers are not learnt, and which messages are dropped."""
        self.file("model/chat_template.jinja", template)
        prepared = self.pipeline().prepare({"messages": list(messages), **record}, "r")
        found = prepared.targets
        return [prepared.text[b:e] for b, e in found.spans], found.untaught, found.dropped

    def test_answers_that_a_template_rewrites_are_context(self):
        # Thoughts are written in the last answer alone, empty ones too.
        template = ("{% for m in messages %}<{{ m.role }}>\n{% if m.role == 'assistant' %}{% set parts = m.content.split('|') %}"
                    "{% if loop.last %}[{{ parts[0] if parts | length > 1 else '' }}]{% endif %}{{ parts[-1] }}"
                    "{% else %}{{ m.content }}{% endif %}$\n{% endfor %}{% if add_generation_prompt %}<assistant>\n{% endif %}")

        def chat(*contents):
            return [{"role": r, "content": c} for r, c in zip(["user", "assistant"] * len(contents), contents)]

        self.assertEqual(self.spans(template, *chat("a", "b", "c", "d")), (["[]d$\n"], 1, []))
        self.assertEqual(self.spans(template, *chat("a", "x|b", "c", "yy|d"))[:2], (["[yy]d$\n"], 1))
        result = self.succeed(self.prepare(self.records({"messages": chat("a", "b", "c", "d")})))
        self.assertIn("1 answers are no targets: the chat template rewrites them", result.stderr)
        # A header that opens thoughts, which an answer without them does not have.
        template = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
                    "{% if add_generation_prompt %}<assistant><think>{% endif %}")
        self.assertEqual(self.spans(template, *chat("a", "<t", "c", "<thi")), (["<t", "<thi"], 0, []))
        self.assertEqual(self.spans(template, *chat("a", "<think>x")), (["x"], 0, []))
        # A count before the chat, which differs in each prefix.
        template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
        self.assertEqual(self.spans(template, *chat("a", "b")), (["b"], 0, []))
        self.assertEqual(self.spans(template, *chat("a", "b", "c", "d")), (["b", "d"], 0, []))
        # Tools before the last question alone, as Mistral's: an answer is the same after other text, or not.
        template = ("{% for m in messages %}{% if m.role == 'user' %}{% if loop.index0 >= messages | length - 2 %}(tools){% endif %}"
                    "<{{ m.content }}>{% else %}{% if loop.last %}THOUGHTS{% endif %}{{ m.content }}$<|endoftext|>{% endif %}{% endfor %}")
        self.assertEqual(self.spans(template.replace("THOUGHTS", ""), *chat("a", "b", "c", "d")),
                         (["b$<|endoftext|>", "d$<|endoftext|>"], 0, []))
        self.assertEqual(self.spans(template.replace("THOUGHTS", "[]"), *chat("a", "b", "c", "d")), (["[]d$<|endoftext|>"], 1, []))
        # A chat that is written backwards, where no prefix is one.
        template = "{% for m in messages | reverse %}[{{ m.role }}]{{ m.content | upper }}<|endoftext|>!{% endfor %}"
        self.assertEqual(self.spans(template, *chat("a", "b"))[0], ["B<|endoftext|>"])
        # An end of the turn that only the last answer has.
        template = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if loop.last %}<|endoftext|>{% endif %}{% endfor %}"
                    "{% if add_generation_prompt %}<assistant>{% endif %}")
        self.assertEqual(self.spans(template, *chat("a", "b", "c", "d")), (["b", "d<|endoftext|>"], 0, []))
        # Prefixes that a template refuses: answers stand where stand-ins in the whole show them.
        template = ("{% if messages | length < 4 %}{{ raise_exception('too short') }}{% endif %}"
                    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{{ eos_token }}{% endfor %}")
        self.assertEqual(self.spans(template, *chat("a", " b ", "c", "d")), (["b<|endoftext|>", "d<|endoftext|>"], 0, []))

    def test_answers_that_are_not_found_are_refused(self):
        self.file("model/chat_template.jinja", "{% for m in messages | reverse %}{{ m.role }}{{ m.content | length }}{% endfor %}")
        chat = self.records({"messages": [USER, {**ANSWER, "content": "here"}]})
        self.refused(self.prepare(chat), "data.jsonl, line 1: messages[1]", "generation")
        # A content that also stands before the chat, but for some: what differs is more than the answer.
        self.file("model/chat_template.jinja", "{% if messages[-1].content[0] != 'h' %}{{ messages[-1].content }}{% endif %}"
                  "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}?{% endif %}")
        self.refused(self.prepare(chat), "data.jsonl, line 1: messages[1]", "generation")

    def test_answers_of_which_a_template_writes_nothing_are_refused(self):
        loop = "{% for c in m.content %}{{ c.text }}{% endfor %}"
        parts = "[{{ m.role }}]" + loop + "!"
        marked = "[{{ m.role }}]{% generation %}" + loop + "!{% endgeneration %}"
        no_calls, thoughts = "[{{ m.role }}]{{ m.content or '' }}<|endoftext|>", "[{{ m.role }}]{{ m.content.split('|')[-1] }}<|endoftext|>"
        call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
        lists, other = 'messages[1]: the chat template writes nothing of this answer; it takes lists of parts: write each content as [{"type"', (
            "messages[1]: the chat template writes nothing of this answer; give another template")
        for each, answer, why in [(parts, ANSWER, lists), (marked, ANSWER, lists), ("[{{ m.role }}]!", ANSWER, other),
                                  ("[{{ m.role }}]!", {**ANSWER, "content": "a"}, other), ("[{{ m.role }}]{{ m.thinking }}!", {
                                      **ANSWER, "thinking": "hm"}, other),
                                  ("[{{ m.role }}]!", {**ANSWER, "content": [{"type": "text", "text": "yo"}]}, other),
                                  (no_calls, call, other), (thoughts, {**ANSWER, "content": "hm|"}, other)]:
            with self.subTest(each, answer=answer):
                self.file("model/chat_template.jinja", f"{{% for m in messages %}}{each}{{% endfor %}}")
                self.refused(self.prepare(self.records({"messages": [USER, answer]})), "data.jsonl, line 1: " + why)
                # One that is not learnt, and thoughts beside an answer, are only counted.
                self.succeed(self.prepare(self.records({"messages": [USER, {**answer, "weight": 0}]}, {"text": "a"})))
                self.out.unlink(), self.out.with_suffix(".json").unlink(), self.out.with_suffix(".mask.bin").unlink()
        for each, answer, dropped in [(no_calls, {**ANSWER, "thinking": "hm"}, [1]), (thoughts, {**ANSWER, "content": "hm|yo"}, [1]),
                                      ("[{{ m.role }}]{{ m.content | upper }}!", {**ANSWER, "content": "yes"}, [0, 1]),
                                      (no_calls, {**ANSWER, "tool_calls": [CALL]}, [1]), (no_calls, {**ANSWER, "content": " "}, [])]:
            self.assertEqual(self.spans(f"{{% for m in messages %}}{each}{{% endfor %}}", USER, answer)[2], dropped)

    def test_content_parts_that_a_template_does_not_take_are_told(self):
        chat = {"messages": [{**USER, "content": [{"type": "text", "text": "hi"}]}, ANSWER]}
        result = self.succeed(self.prepare(self.records(chat, {"messages": [USER, ANSWER]})))
        self.assertIn("1 chats have content parts that the chat template does not take: it is given one text of them", result.stderr)
        self.assertIn("[user]hi![assistant]yo!", self.text_and_targets()[0])
        self.file("model/chat_template.jinja", "{{ raise_exception('no') }}{{ '' + messages[0].content }}")
        self.out.unlink()
        self.refused(self.prepare(self.records(chat)), "line 1: the chat template refuses the chat: no")

    def test_marks_decide_where_a_template_has_them(self):
        template = ("{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content }}!"
                    "{% endgeneration %}{% else %}{{ m.content }}!{% endif %}{% endfor %}")
        self.assertEqual(self.spans(template, USER, ANSWER, USER, {**ANSWER, "weight": 0})[0], ["yo!"])
        # Two marks in an answer: which are those of the answer with weight 0 is told by prefixes.
        template = ("{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% for c in m.content %}{% generation %}{{ c }}"
                    "{% endgeneration %}-{% endfor %}{% else %}{{ m.content }}!{% endif %}{% endfor %}")
        self.assertEqual(self.spans(template, USER, ANSWER, USER, ANSWER)[0], list("yoyo"))
        self.assertEqual(self.spans(template, USER, {**ANSWER, "weight": 0}, USER, {**ANSWER, "content": "abc"})[0], list("abc"))
        # Marks in a text that the template works on are no help: growing prefixes are.
        template = ("{% for m in messages %}{% set text %}{% generation %} {{ m.content }} {% endgeneration %}{% endset %}"
                    "[{{ m.role }}]{{ text | trim }}!{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}")
        self.assertEqual(self.spans(template, USER, ANSWER)[0], ["yo!"])
        # Marks that leave out the end of the turn.
        self.file("model/chat_template.jinja", "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
                  "{% endgeneration %}{{ eos_token }}{% else %}{{ m.content }}{% endif %}{% endfor %}")
        result = self.succeed(self.prepare(self.records({"messages": [USER, ANSWER]})))
        self.assertIn("leave out the end of the turn", result.stderr)
        self.assertEqual(self.text_and_targets()[1], "yo")

    def test_what_a_template_drops_is_told(self):
        for template, dropped in [
                ("{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}!{% endfor %}", [0]),
                ("{% for m in messages %}[{{ m.role }}]{{ m.content.split('</t>')[-1] }}!{% endfor %}", [2]),
                ("{% for m in messages %}[{{ m.role }}]{{ m.content | upper }}!{% endfor %}", [0, 1, 2]),
                ("{% for m in messages %}[{{ m.role }}]{{ m.content | tojson }}!{% endfor %}", []),
                ("{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}!{% endfor %}", []),
                ("{{ messages[1].content }}{{ messages[0].content }}[assistant]{{ messages[-1].content }}"
                 "{% if add_generation_prompt %}{% endif %}", [])]:
            with self.subTest(template):
                found = self.spans(template, {"role": "system", "content": " Be\nnice "}, {"role": "user", "content": 'say "hi"'},
                                   {"role": "assistant", "content": "<t>deep thought</t>yo"})
                self.assertEqual(found[2], dropped)
        self.file("model/chat_template.jinja", "{% for m in messages %}[{{ m.role }}]{{ m.content }}!{% endfor %}")
        thoughts = {"messages": [USER, {**ANSWER, "reasoning_content": "deep"}], "tools": [CALL]}
        result = self.succeed(self.prepare(self.records({"messages": [USER, ANSWER]}, thoughts)))
        self.assertIn("1 messages or thoughts are not, or not whole", result.stderr)
        self.assertIn("data.jsonl, line 2: messages[1]", result.stderr)
        self.assertIn("1 chats have tools that the chat template does not write", result.stderr)
        # The message is named as it stands in the record.
        for record, name in (({**thoughts, "system": "S"}, "messages[1]"), ({"prompt": [USER], "completion": thoughts["messages"][1:]},
                                                                           "completion[0]"),
                             ({"conversations": thoughts["messages"]}, "conversations[1]")):
            result = self.succeed(self.prepare(self.records(record)))
            self.assertIn(f"data.jsonl, line 1: {name})", result.stderr)

    def test_arguments_that_a_template_quotes_are_told(self):
        for arguments, told in (({"a": 1}, 0), ('{"a": 1}', 1)):
            call = {"type": "function", "function": {"name": "get", "arguments": arguments}}
            record = {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]}
            result = self.succeed(self.prepare(self.records(record)))
            self.assertEqual(result.stderr.count("a text within a text: write them as objects"), told)

    def test_templates_stand_where_models_have_them(self):
        default, tool_use = "{% for m in messages %}d{{ m.content }}!{% endfor %}", "{% for m in messages %}t{{ m.content }}!{% endfor %}"
        chat = {"messages": [USER, ANSWER]}
        (self.model / "chat_template.jinja").unlink()
        named = [{"name": "default", "template": default}, {"name": "tool_use", "template": tool_use}]
        for files, plain, with_tools in [
                ({"tokenizer_config.json": json.dumps({"chat_template": default})}, "dhi!dyo!", "dhi!dyo!"),
                ({"chat_template.json": json.dumps({"chat_template": default})}, "dhi!dyo!", "dhi!dyo!"),
                ({"tokenizer_config.json": json.dumps({"chat_template": named})}, "dhi!dyo!", "thi!tyo!"),
                ({"chat_template.jinja": default, "additional_chat_templates/tool_use.jinja": tool_use}, "dhi!dyo!", "thi!tyo!"),
                ({"chat_template.jinja": default, "tokenizer_config.json": json.dumps({"chat_template": tool_use})}, "dhi!dyo!", "dhi!dyo!")]:
            with self.subTest(files):
                for name, content in {"tokenizer_config.json": "{}", **files}.items():
                    self.file(f"model/{name}", content)
                self.assertEqual(self.learnt(chat)[1], plain)
                self.assertEqual(self.learnt({**chat, "tools": [CALL]})[1], with_tools)
                for name in files:
                    (self.model / name).unlink()
        for name, content, *words in [
                ("tokenizer_config.json", "{", "not JSON"), ("tokenizer_config.json", "[]", "no object"),
                ("tokenizer_config.json", "[" * 100000, "nested too deep"),
                ("tokenizer_config.json", '{"chat_template": [{"name": "rag", "template": "x"}]}', "called default"),
                ("tokenizer_config.json", '{"chat_template": 1}', "no text"), ("chat_template.jinja", b"\xff", "byte 0 is not UTF-8"),
                ("chat_template.json", "", "not JSON"),
                ("tokenizer_config.json", '{"eos_token": 5}', "model/tokenizer_config.json: eos_token: a token's text, or an object"),
                ("special_tokens_map.json", '{"pad_token": {"id": 5}}', "model/special_tokens_map.json: pad_token: a token's text")]:
            path = self.file(f"model/{name}", content)
            self.refused(self.prepare(self.records(chat)), *words)
            path.unlink()

    def test_a_template_that_fails_is_one_line(self):
        chat = self.records({"messages": [USER]})
        for template, *words in [
                ("{% for %}", "TemplateSyntaxError"), ("{{ nothing.at.all }}", "line 1", "UndefinedError"),
                ("{{ ''.__class__.__mro__ }}", "SecurityError"), ("{% for i in range(10 ** 9) %}{% endfor %}", "OverflowError"),
                ("{{ 1 // 0 }}", "the chat template fails: ZeroDivisionError: "), ("{{ raise_exception('no\nline') }}", "refuses the chat: no line")]:
            self.file("model/chat_template.jinja", template)
            self.refused(self.prepare(chat), "the chat template", *words)

    # -- wrong records ----------------------------------------------------------------------------------------

    def test_wrong_records_are_refused_by_line_and_field(self):
        def chat(*messages, **record):
            return {"messages": list(messages), **record}

        image = {"type": "image_url", "image_url": {"url": "x"}}
        for record, *words in [
                ({}, "no field"), ({"id": 1}, "a record needs", "'id'"), ({"text": 5}, "field text", "a number"),
                ({"text": ["a"]}, "field text", "a list"), ({"prompt": "a"}, "a record needs"),
                ({"prompt": "a", "completion": [ANSWER]}, "prompt is text, completion is a list"),
                ({"prompt": "a", "completion": {"a": 1}}, "field completion", "an object"),
                ({"prompt": "a", "completion": "b", "tools": [CALL]}, "field tools", "as messages"),
                ({"text": "a", "messages": [USER, ANSWER]}, "fits the formats messages and text", "--format"),
                ({"prompt": "a", "completion": "b", "conversations": [USER, ANSWER]}, "fits the formats sharegpt and prompt"),
                ({"instruction": "a", "output": "b", "text": "c"}, "fits the formats alpaca and text"),
                ({"instruction": "a", "input": 5, "output": "b"}, "field input", "a number"),
                ({"instruction": "a", "output": "b", "history": ["x"]}, "field history"),
                ({"prompt": "a", "chosen": "b", "rejected": "c"}, "--objective dpo"),
                ({"text": "a", "images": ["x.png"]}, "field images", "pictures"), ({"input_ids": [1]}, "field input_ids", "token ids"),
                ({"text": "a", "loss_mask": [1]}, "field loss_mask: masks of tokens"),
                (chat(), "field messages", "a list of messages"), (chat("a"), "messages[0] is text"),
                ({"messages": "a"}, "field messages", "a list of messages"), (chat({"content": "a"}), "messages[0].role is null"),
                (chat(USER, {"role": "assistant"}), "messages[1].content is null"),
                (chat({"role": "user", "content": None}, ANSWER), "messages[0].content is null"),
                (chat(USER, {"role": "assistant", "content": {"a": 1}}), "messages[1].content is an object"),
                (chat({"role": "user", "content": [{"type": "text", "text": "a"}, image]}, ANSWER), "messages[0].content[1]",
                 "of type image_url"),
                (chat({"role": "user", "content": [5]}), "messages[0].content[0] is a number"),
                (chat(USER, {**ANSWER, "weight": 0.5}), "messages[1].weight is 0.5"),
                (chat({**USER, "weight": 1}, ANSWER), "messages[0]", "weight on what the user says"),
                (chat(USER, {**ANSWER, "weight": 1, "train": False}), "weight and train say opposite things"),
                (chat(USER, {**ANSWER, "train_detail": []}), "messages[1].train_detail"),
                (chat(USER, ANSWER, weight=0), "field weight", "whole record"),
                (chat(USER, ANSWER, tools={"name": "a"}), "field tools", "a list of objects"),
                (chat(USER, ANSWER, tools="[not json"), "field tools: not JSON"),
                (chat(USER, ANSWER, functions=[{"name": "a"}]), "field functions"),
                (chat(USER, ANSWER, chat_template_kwargs={"messages": []}), "field chat_template_kwargs"),
                (chat(USER, {**ANSWER, "tool_calls": "[1]"}), "messages[1].tool_calls"),
                (chat(USER, {**ANSWER, "refusal": "no"}), "messages[1].refusal"),
                ({"conversations": [{"from": "narrator", "value": "a"}]}, "conversations[0].from is 'narrator'"),
                ({"conversations": [{"from": "function_call", "value": "get"}]}, "conversations[0]: not JSON"),
                ({"conversations": [{"from": "gpt", "text": "a"}]}, "conversations[0].content is null")]:
            with self.subTest(record):
                from preparation.errors import Refusal
                with self.assertRaises(Refusal) as raised:
                    self.encode(record)
                line = str(raised.exception)
                self.assertTrue(line.startswith("record: "), line)
                self.assertEqual(line.count("\n"), 0)
                for word in words:
                    self.assertIn(word, line)
        # One of them through the command, in the second line.
        bad = chat({"role": "user", "content": [image]}, ANSWER)
        self.refused(self.prepare(self.records(chat(USER, ANSWER), bad)), "data.jsonl, line 2: messages[0].content[0] is of type image_url")
        self.without_template()
        for record, *words in [(chat(USER, ANSWER, tools=[CALL]), "line 1: field tools", "chat template"),
                               (chat(USER, {**ANSWER, "tool_calls": [CALL]}), "line 1: messages[1].tool_calls"),
                               (chat(USER, {**ANSWER, "reasoning_content": "a"}), "line 1: messages[1].reasoning_content"),
                               ({"instruction": "a", "output": "b", "tools": [CALL]}, "line 1: field tools")]:
            self.refused(self.prepare(self.records(record)), *words)

    def test_wrong_flags_are_refused(self):
        records = self.records({"text": "a"}, {"text": "b"})
        for flags, *words in [
                (["--format", "alpaca"], "--format alpaca", "'text'"), (["--end-token", "<none>"], "--end-token <none>: the tokenizer has"),
                (["--row-length", "4"], "--layout rows"), (["--layout", "rows", "--row-length", "1"], "--row-length: at least 2"),
                (["--validation", "1"], "--validation 1"), (["--validation", "-0.1"], "--validation -0.1"),
                (["--validation", "nan"], "--validation nan"), (["--date", "26.7.2024"], "--date 26.7.2024", "YYYY-MM-DD"),
                (["--date", "2024-02-30"], "--date 2024-02-30"), (["--end-token", "a", "--no-end-token"], "give one of them"),
                (["--workers", "0"], "--workers"), (["--show", "-1"], "--show")]:
            with self.subTest(flags):
                self.refused(self.prepare(*flags, records), *words)
        self.assertEqual(self.prepare("--format", "csv", records).returncode, 2)
        self.refused(self.prepare("--validation", "0.5", self.file("one.txt", "a")), "1 record cannot be split")
        self.refused(self.prepare(records, tokenizer=self.root), "no tokenizer.json there")
        self.file("old/tokenizer.model", "x")
        self.refused(self.prepare(records, tokenizer=self.root / "old"), "a tokenizer.model alone", "save_pretrained")
        self.refused(self.prepare(records, tokenizer=self.file("bad.json", "{}")), "--tokenizer", "bad.json")

    # -- what is told and split -------------------------------------------------------------------------------

    def test_the_first_records_are_shown(self):
        chat = self.records({"messages": [USER, ANSWER]}, {"prompt": "a\x1b[31m\u202e", "completion": "b\u00e9\U0001f600"}, {"text": "x"})
        shown = self.succeed(self.prepare("--show", "2", chat)).stdout
        self.assertIn("recognised: messages, written by the tokenizer's chat template\n", shown)
        self.assertIn("data.jsonl, line 1: messages, roles user assistant: ", shown)
        self.assertIn("  context | [user]hi![assistant]\n  TARGET  | yo!\n", shown)
        self.assertIn("data.jsonl, line 2: prompt: ", shown)
        self.assertIn("  context | a\\u001b[31m\\u202e\n  TARGET  | b\u00e9\U0001f600<|endoftext|>\n", shown)
        self.assertEqual(shown.count("data.jsonl, line"), 2)
        ids = self.written()[0]
        self.assertRegex(shown, r"line 1: messages, roles user assistant: \d+ tokens, \d+ of them targets")
        self.assertIn("formats: 1 messages, 1 prompt, 1 text\n", shown)
        self.assertEqual(self.succeed(self.prepare(chat)).stdout.count("data.jsonl, line"), 1)
        quiet = self.succeed(self.prepare("--show", "0", chat)).stdout
        self.assertEqual(quiet.count("context") + quiet.count("data.jsonl"), 0)
        self.assertEqual(self.written()[0], ids)
        long = self.file("long.txt", "word " * 100000)
        shown = self.succeed(self.prepare(long)).stdout
        self.assertLess(len(shown), 2000)
        self.assertIn("characters ...", shown)
        self.assertIn("(its first 4000 characters)", shown)

    def test_parts_of_another_command_are_not_gone_on_with(self):
        from preparation.pipeline import Pipeline
        from preparation.run import Settings, fingerprint
        data = self.records({"text": "a"})

        def key(**changes):
            settings = Settings(inputs=[data], tokenizer=str(self.model), out=self.out, **changes)
            return fingerprint(settings, [data], Pipeline(**settings.pipeline()))

        found = [key()]
        self.assertEqual(key(workers=7, show=3, validation=0.5), found[0])  # parts are the same
        found += [key(**change) for change in ({"layout": "rows"}, {"layout": "rows", "row_length": 9}, {"form": "text"},
                                               {"end_token": "!"}, {"no_end_token": True}, {"date": "2025-01-01"}, {"part_bytes": 9})]
        self.file("model/chat_template.jinja", TEMPLATE + "x")
        found.append(key())
        self.file("model/tokenizer_config.json", json.dumps({"eos_token": "<|endoftext|>", "bos_token": "!"}))
        found.append(key())
        made = byte_level("<|endoftext|>", before="<|endoftext|>")
        made.save(str(self.model / "tokenizer.json"))
        found += [key(), key(special_tokens=False)]
        self.records({"text": "ab"})
        found.append(key())
        import preparation.run
        preparation.run.FORMAT_VERSION += 1
        self.addCleanup(setattr, preparation.run, "FORMAT_VERSION", preparation.run.FORMAT_VERSION - 1)
        found.append(key())
        self.assertEqual(len(set(found)), len(found))

    def test_validation_splits_by_record(self):
        records = self.records(*({"prompt": f"{i}=", "completion": str(i)} for i in range(200)), name="d/data.jsonl")
        self.out = self.root / "d" / "out.bin"
        self.succeed(self.prepare("--no-end-token", records))
        whole = self.text_and_targets()[0]
        found = []
        for flags in ([], ["--part-bytes", "300", "--workers", "2"], ["--layout", "rows"]):
            result = self.succeed(self.prepare("--validation", "0.1", "--no-end-token", *flags, records))
            self.assertEqual(len(result.stdout.splitlines()[-1:]), 1)
            self.assertIn("20 records", result.stdout.splitlines()[-1])
            held_out = self.root / "d" / "out-validation.bin"
            sets = [self.written(out) for out in (self.out, held_out)]
            self.assertEqual([d["records"] for _, _, d in sets], [180, 20])
            self.assertEqual(sets[1][2]["validation_of"], "out.bin")
            if "rows" in flags:
                length = sets[0][2]["row_length"]
                self.assertEqual([len(ids) for ids, _, _ in sets], [180 * length, 20 * length])
            else:
                found.append([s[:2] for s in sets])
                texts = [self.text_and_targets(out)[0] for out in (self.out, held_out)]
                self.assertEqual(sorted(texts[0] + texts[1]), sorted(whole))
                # Records are held out from everywhere, not the first ones.
                self.assertTrue(any(f"{i}={i}" in texts[1] for i in range(100, 200)), texts[1])
        self.assertEqual(found[0], found[1])
        # Named by a run without the flag, whose records it now shares; and left out of a folder that is read.
        result = self.succeed(self.prepare("--no-end-token", records))
        self.assertIn("out-validation.bin is of an earlier run", result.stderr)
        result = self.succeed(self.prepare("--no-end-token", "--validation", "0.02", self.root / "d"))
        self.assertEqual(self.written(held_out)[2]["records"], 4)
        left_out = next(line for line in result.stderr.splitlines() if line.startswith("left out, as outputs"))
        self.assertIn("out-validation.bin", left_out)

    def test_the_program_trains_on_what_is_written(self):
        records = self.records(*({"messages": [{"role": "user", "content": f"{i} and {i}?"}, {"role": "assistant", "content": str(2 * i)}]}
                                 for i in range(40)))
        self.succeed(self.prepare("--layout", "rows", "--row-length", "33", "--validation", "0.2", records))
        description = self.written()[2]
        model = self.file("config.json", json.dumps({
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 512, "n_embd": 32, "n_layer": 1, "n_head": 2,
            "n_positions": 32, "n_ctx": 32}))
        run = self.root / "run"
        self.succeed(self.run_program("train", "--model", model, "--data", self.out, "--eval-data", self.root / "out-validation.bin",
                                      "--out", run, "--epochs", "1", "--device", "host", "--threads", "1"))
        self.assertEqual(self.summary(run)["tokens"], description["targets"])
        self.refused_by_program(self.train("--steps", "1", "--out", self.root / "other", data=self.out))

    def refused_by_program(self, result):
        ProgramTest.refused(self, result, 4, f"vocabulary of {self.written()[2]['vocab_size']}")

    def test_validation_overwrites_nothing_of_others(self):
        records = self.records({"text": "a"}, {"text": "b"})
        for name in ("out-validation.bin", "out-validation.json", "out-validation.mask.bin"):
            path = self.file(name, "mine")
            self.refused(self.prepare("--validation", "0.5", records), f"{name} is not written by this tool")
            self.assertEqual(path.read_text(), "mine")
            path.unlink()
        mine = self.file("out-validation.json", '{"text": "mine"}\n{"text": "too"}\n')
        self.refused(self.prepare("--validation", "0.5", mine), "would be written and is an input")
        mine.unlink()
        for _ in range(2):
            self.succeed(self.prepare("--validation", "0.5", records))
        self.assertEqual([self.written(self.root / f"{n}.bin")[2]["records"] for n in ("out", "out-validation")], [1, 1])


if __name__ == "__main__":
    main()
