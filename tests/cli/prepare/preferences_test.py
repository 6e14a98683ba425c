"""Preferences of tools/prepare_data.py: pairs of rows that are alike up to their answers, of which the answers alone are
targets, in all forms that people have them in; and what is refused, by line."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import peers  # noqa: E402

peers.run_under_one_with("tokenizers", "jinja2")

import json  # noqa: E402

from common import PrepareTest, byte_level, main  # noqa: E402

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}!{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"


def said(role, text):
    return {"role": role, "content": text}


ASKED, GOOD, BAD = said("user", "hi"), said("assistant", "yo"), said("assistant", "no")
SYSTEM = said("system", "S")


class Preferences(PrepareTest):
    def setUp(self):
        super().setUp()
        self.tokenizer(byte_level("<|endoftext|>"), TEMPLATE, eos_token="<|endoftext|>")

    def answers(self, record):
        """Text and learnt text of the chosen one and of the rejected one."""
        pipeline, found = self.pipeline(), []
        for prepared in pipeline.prepare_all(record, "r"):
            self.assertEqual(prepared.form, "preference")
            learnt = [i for i, m in zip(prepared.encoded.ids, prepared.encoded.mask) if m]
            found += [pipeline.tokenizer.decode(ids, skip_special_tokens=False) for ids in (prepared.encoded.ids, learnt)]
        return tuple(found)

    def test_every_form_is_a_prompt_and_two_answers(self):
        end = "<|endoftext|>"
        texts = ("Q: hi A: yo" + end, " yo" + end, "Q: hi A: no" + end, " no" + end)
        chats = ("[user]hi![assistant]yo!", "yo!", "[user]hi![assistant]no!", "no!")
        with_system = ("[system]S!" + chats[0], "yo!", "[system]S!" + chats[2], "no!")
        turns = [ASKED, BAD, said("user", "so")]
        for record, expected in [
                ({"prompt": "Q: hi A:", "chosen": " yo", "rejected": " no"}, texts),
                ({"chosen": "Q: hi A: yo", "rejected": "Q: hi A: no"}, texts),
                ({"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}, chats),
                ({"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, chats),
                ({"prompt": "hi", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD], "score_chosen": 9.0}, chats),
                ({"prompt": [SYSTEM, ASKED], "chosen": [GOOD], "rejected": [BAD]}, with_system),
                ({"system": "S", "prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}, with_system),
                ({"system": "S", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, with_system),
                # Answers of the common beginning are read only.
                ({"chosen": [*turns, GOOD], "rejected": [*turns, BAD]},
                 ("[user]hi![assistant]no![user]so![assistant]yo!", "yo!", "[user]hi![assistant]no![user]so![assistant]no!", "no!")),
                ({"chosen": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}],
                  "rejected": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "no"}]}, chats)]:
            with self.subTest(record):
                self.assertEqual(self.answers(record), expected)

    def test_pairs_are_rows_one_behind_the_other(self):
        data = self.records(*({"prompt": f"{i}:", "chosen": f" yes{i}", "rejected": f" no, {i}"} for i in range(7)))
        for workers in ("1", "2"):
            result = self.succeed(self.prepare("--validation", "0.3", "--part-bytes", "60", "--workers", workers, data))
            self.assertIn("5 pairs, ", result.stdout)
            self.assertIn("recognised: preference", result.stdout)
            self.assertIn("line 1, rejected: preference", result.stdout)
            seen = []
            for out in (self.out, self.out.with_name("out-validation.bin")):
                ids, mask, description = self.written(out)
                self.assertEqual((description["layout"], description["pairs"]), ("rows", True))
                length = description["row_length"]
                tokenizer = self.pipeline().tokenizer
                rows = [tokenizer.decode(ids[i:i + length], skip_special_tokens=False).replace("<|endoftext|>", "")
                        for i in range(0, len(ids), length)]
                learnt = [tokenizer.decode([t for t, m in zip(ids[i:i + length], mask[i:i + length]) if m])
                          for i in range(0, len(ids), length)]
                for i in range(0, len(rows), 2):
                    number = rows[i].split(":")[0]
                    self.assertEqual(rows[i:i + 2], [f"{number}: yes{number}", f"{number}: no, {number}"])
                    self.assertEqual(learnt[i:i + 2], [f" yes{number}", f" no, {number}"])
                    seen.append(number)
            self.assertEqual(sorted(seen), list("0123456"))

    def test_other_layouts_are_refused(self):
        data = self.records({"prompt": "a", "chosen": " b", "rejected": " c"})
        for layout in (["--layout", "stream"], ["--layout", "packed", "--row-length", "64"]):
            self.refused(self.prepare(*layout, data), f"--layout {layout[1]}", "leave it out")

    def test_mistakes_are_refused_by_line(self):
        good = {"prompt": "a", "chosen": " b", "rejected": " c"}
        long = {**good, "rejected": " c" * 60}
        for record, *words in [
                ({"prompt": "a", "chosen": " b"}, "field rejected is missing"),
                ({"prompt": "a", "rejected": " b"}, "field chosen is missing"),
                ({**good, "rejected": None}, "field rejected is missing"),
                ({**good, "rejected": " b"}, "chosen and rejected are the same"),
                ({"chosen": "a b", "rejected": "a b"}, "the same"),
                ({**good, "chosen": "  "}, "field chosen: the answer is empty"),
                ({"chosen": "a b", "rejected": "a b c"}, "field chosen: the answer is empty"),
                ({"chosen": [ASKED, GOOD], "rejected": [ASKED]}, "field rejected: the answer is empty"),
                ({"prompt": [ASKED], "chosen": [GOOD], "rejected": [said("assistant", "")]}, "field rejected: the answer is empty"),
                ({"prompt": [ASKED], "chosen": [GOOD], "rejected": [said("user", "no")]}, "field rejected: the answer is empty"),
                ({**good, "chosen": [GOOD]}, "chosen is a list, rejected is text"),
                ({"prompt": "what", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, "prompt is text", "none of their common ones"),
                ({**good, "messages": [ASKED, GOOD]}, "messages and preference", "--format messages"),
                ({"text": "a"}, "mixed"),
                (long, "field rejected: the answer is cut off by --row-length 64", "tokens"),
                ({**good, "chosen": [1], "rejected": [2]}, "chosen[0] is a number")]:
            with self.subTest(record):
                line = self.refused(self.prepare("--row-length", "64", "--show", "0", self.records(good, record)), *words)
                self.assertIn("data.jsonl, line 2", line)

    def test_a_single_record_is_asked_for_what_it_is(self):
        from preparation.errors import Refusal
        with self.assertRaisesRegex(Refusal, "--objective dpo"):
            self.pipeline().prepare({"prompt": "a", "chosen": " b", "rejected": " c"}, "r")


if __name__ == "__main__":
    main()
