"""`tandem finetune` on one's own data: one command from a chat file to a model that answers, and the numbers that it decides."""
import json
import pathlib
import sys
import tomllib

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from finetuning import CHAT_TEMPLATE, END, FinetuneTest, main, records, write_llama  # noqa: E402

LOSS = 0.02  # bound for a token, in the evaluation; a guess among the eight colours has 0.4


class Whole(FinetuneTest):
    def answers(self, asked):
        lines = "".join(f"{line}\n/reset\n" for line in asked)
        return self.succeed(self.tandem("chat", self.out, "--temperature", "0", "--max-tokens", "12", text=lines)).stdout.splitlines()

    def check_answers(self):
        """The best loss is low, and what `tandem chat` answers to the questions of the data is what they answer."""
        best = min(m["eval_loss"] for m in self.metrics(self.out) if "eval_loss" in m)
        self.assertLess(best, LOSS)
        chosen = [record["conversations"] for record in records()[::9]]
        self.assertEqual(self.answers([question["value"] for question, _ in chosen]), [answer["value"] for _, answer in chosen])

    def stage(self, name):
        return json.loads((self.out / "stages" / f"{name}.json").read_text())

    def test_a_model_without_a_template_learns_its_chats(self):
        write_llama(self.model)
        done = self.succeed(self.finetune())
        self.assertEqual(done.stdout.splitlines()[-1], f"next: tandem chat {self.out}")
        for words in ("has no chat template", f"  TARGET  | It is red.{END}\n", "roles user assistant", "this takes about",
                      "engine: native, as LlamaForCausalLM"):
            self.assertIn(words, done.stdout)
        self.assertNotIn("tandem export", done.stdout)  # the command alone says what comes next
        self.check_answers()
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors"):
            self.assertTrue((self.out / "model" / name).is_file(), name)
        self.assertTrue((self.out / "report.html").read_text().rstrip().endswith("</html>"))
        again = self.succeed(self.finetune())
        self.assertNotIn("step ", again.stdout)
        self.assertEqual(again.stdout.splitlines()[-1], done.stdout.splitlines()[-1])

    def test_a_template_and_an_end_that_the_model_does_not_name(self):
        """The end of an answer is what the template writes, and generation ends there."""
        write_llama(self.model, CHAT_TEMPLATE, named_end=False)
        done = self.succeed(self.finetune())
        self.assertNotIn("has no chat template", done.stdout)
        self.check_answers()
        end = self.stage("choices")["turn_end"]
        self.assertEqual(json.loads((self.out / "model" / "generation_config.json").read_text())["eos_token_id"], end)

    def test_the_numbers_that_it_decides(self):
        """200 records: 5% held out, 15 times the rest, 8 of them a step; the rate by the square root, here its limit."""
        write_llama(self.model, CHAT_TEMPLATE)
        self.succeed(self.finetune("--steps", "30"))
        prepared, schedule = self.stage("prepared"), self.stage("schedule")
        self.assertEqual(prepared["records"], 190)
        rows = schedule["micro_batch"] * schedule["accumulation"]
        self.assertEqual(rows, round(8 * prepared["rows"] / 190))
        config = tomllib.loads((self.out / "config.toml").read_text())
        for name, value in {"lr": 2e-3, "lr-schedule": "cosine", "warmup-steps": 1, "weight-decay": 0.0, "beta1": 0.9, "beta2": 0.95, "clip": 1.0,
                            "patience": 3, "steps": 30, "eval-every": -(-prepared["rows"] // rows) // 2, "keep-best": True}.items():
            self.assertEqual(config[name], value, name)

    def test_the_best_is_kept_and_not_the_last(self):
        """Answers that nothing tells of what is held out: its loss rises again while the others are learnt."""
        write_llama(self.model, CHAT_TEMPLATE)
        data = [{"prompt": f"{n * n % 89} {n}", "completion": f"{n * n * 31 % 97}"} for n in range(100)]
        self.succeed(self.finetune("--patience", "2", "--eval-every", "10", data=self.write_records(data)))
        losses = {m["step"]: m["eval_loss"] for m in self.metrics(self.out) if "eval_loss" in m}
        best = min(losses, key=losses.get)
        self.assertEqual((self.summary(self.out)["ended_by"], self.summary(self.out)["steps"]), ("patience", best + 20))
        for flags, same in ((["--best"], True), ([], False)):
            to = self.root / f"exported{len(flags)}"
            self.succeed(self.run_program("export", self.out, *flags, "--to", to))
            self.assertEqual((to / "model.safetensors").read_bytes() == self.tensors(), same, flags)

    def test_nothing_held_out(self):
        write_llama(self.model, CHAT_TEMPLATE)
        self.succeed(self.finetune("--steps", "3", "--validation", "0"))
        self.assertIsNone(self.summary(self.out)["eval_loss"])
        self.assertTrue((self.out / "model" / "config.json").is_file())

    def test_text(self):
        """One document is learnt whole, in windows, however long it is."""
        write_llama(self.model)
        text = self.file("notes.txt", "It is red. " * 300)
        done = self.succeed(self.finetune("--epochs", "1", data=text))
        self.assertIn("nothing is held out", done.stdout)
        prepared = self.stage("prepared")
        self.assertEqual(prepared["tokens"], prepared["targets"])
        self.assertGreater(prepared["tokens"], 4 * 256)
        self.assertGreater(self.summary(self.out)["tokens"], prepared["tokens"] - 2 * 256)
        self.assertIn(f"next: tandem sample --model {self.out / 'model'}", done.stdout.splitlines()[-1])
        self.assertFalse((self.out / "model" / "chat_template.jinja").exists())


    def test_files_of_different_formats(self):
        """Each file is looked at: chats behind thousands of texts have a template, too."""
        write_llama(self.model)
        texts = self.file("a.jsonl", json.dumps({"text": "It is red."}) + "\n")
        texts.write_text(texts.read_text() * 2500)
        self.succeed(self.finetune("--steps", "1", self.data, data=texts))
        self.assertTrue(self.stage("choices")["chats"])
        self.assertTrue((self.out / "model" / "chat_template.jinja").is_file())


class Commands(FinetuneTest):
    def test_prepare_is_the_tool(self):
        write_llama(self.model)
        done = self.succeed(self.tandem("prepare", "--tokenizer", self.model, "--out", "x.bin", self.data))
        self.assertIn("200 records", done.stdout)
        self.refused(self.tandem("prepare", "--tokenizer", self.root / "none", "--out", "y.bin", self.data), 2, "tokenizer.json")

    def test_chat_with_what_is_no_run(self):
        self.refused(self.tandem("chat", self.root / "none"), 2, "none")
        self.refused(self.tandem("chat"), 2, "RUN")

    def test_help_names_all(self):
        text = self.succeed(self.tandem("--help")).stdout
        for name in ("train", "finetune", "prepare", "chat"):
            self.assertIn(f"  {name}", text)
        text = self.succeed(self.tandem("finetune", "--help")).stdout
        self.assertIn("--patience EVALUATIONS", text)


if __name__ == "__main__":
    main()
