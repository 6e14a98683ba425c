#!/usr/bin/env python3
"""Text, JSON lines and chat records to token files for tandem, with a Hugging Face tokenizer.

    tools/prepare_data.py --tokenizer tokenizer.json --out data/train.bin corpus/ more.txt
    tools/prepare_data.py --tokenizer model/ --out data/chat.bin --layout rows --row-length 513 chat.jsonl

Writes NAME.bin (uint16, or uint32 for vocabularies beyond 65,536), NAME.json beside it, and NAME.mask.bin
where not every token is a target: a byte per token, 1 where it is one. Existing files of these names, and a folder
NAME.parts, are replaced only if this tool wrote them and none of them is an input; else nothing is done (exit 2).

Inputs are files and folders (read recursively in byte order of path, links not followed; outputs of this tool in
them are left out). A file that ends in .jsonl or .json holds a record a line:
  {"text": "..."}                                     every token is a target
  {"prompt": "...", "completion": "..."}              those of the completion are
  {"messages": [{"role": "...", "content": "..."}]}   those of the assistant's contents are
Every other file is one document of text. Chats are written by the template that the tokenizer's folder brings
(chat_template.jinja, or tokenizer_config.json; needs the Python package jinja2, which runs it in its sandbox),
else with a line <|role|> before each content.

Layouts: stream joins documents by the end token, to be cut in windows; rows gives each record a row of its own,
padded, and never joins two. Work is done in parts of --part-bytes of input, in parallel. They lie in NAME.parts,
which is removed at the end, also after an error, Ctrl-C or SIGTERM. After SIGKILL or a power failure the same command
goes on with the parts that are missing.
"""
import argparse
import array
import contextlib
import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
from pathlib import Path

from prepare_output import WRITER, Interrupted, Outputs, Refusal, Signals, WriteFailure, find_inputs, flush, is_masked, writing

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>")
# How a chat is written for a model that brings no template of its own.
CHAT = ("<|{role}|>\n", "\n")


def tokenizer_file(name):
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        raise Refusal(f"--tokenizer {name}: no tokenizer.json there; name the file, or a folder that holds it")
    return path


def is_records(path):
    return path.suffix in (".jsonl", ".json")


# -- parts: what one worker does at a time ------------------------------------------------------------------

def parts_of(paths, part_bytes):
    """(file, first byte, last byte) of pieces that end at a line's end; a document of text is one piece."""
    parts = []
    for path in paths:
        size = path.stat().st_size
        if not is_records(path) or size <= part_bytes:
            parts.append((str(path), 0, size))
            continue
        with path.open("rb") as file:
            begin = 0
            while begin < size:
                file.seek(min(begin + part_bytes, size))
                file.readline()
                end = file.tell()
                parts.append((str(path), begin, end))
                begin = end
    return parts


def documents(part):
    """(place, record) of each; a document of text is {"text": ...}."""
    name, begin, end = part
    with open(name, "rb") as file:
        file.seek(begin)
        content = file.read(end - begin)
    if not is_records(Path(name)):
        yield name, {"text": content.decode("utf-8", errors="replace")}
        return
    at = begin
    for line in content.splitlines(keepends=True):
        if line.strip():
            try:
                yield f"{name}, byte {at}", json.loads(line)
            except ValueError as error:
                raise Refusal(f"{name}, byte {at}: not a line of JSON ({error})") from None
        at += len(line)


def plain_chat(messages):
    found = []
    for m in messages:
        found.append((CHAT[0].format(role=m["role"]), False))
        found.append((m["content"] + CHAT[1], m["role"] == "assistant"))
    return found


def begin_of_answer(messages, i, until, template):
    """Where in `until`, the chat up to message i as the template writes it, the answer begins behind its header; or None."""
    if i == 0:
        return 0
    header, before = template(messages[:i], True), template(messages[:i], False)
    if until.startswith(header):
        return len(header)
    # A header that also opens thoughts, which an answer without them does not have.
    return len(os.path.commonprefix([until, header])) if until.startswith(before) and header.startswith(before) else None


def templated(messages, template, place):
    """(pieces, answers that are no targets) of a chat as the template writes it whole. An answer is a target where it is
    written as it is when it comes last: one that is rewritten once others follow, as by templates that leave out earlier
    thoughts, is not how the model is to answer."""
    whole, found, at, others = template(messages, False), [], 0, 0
    for i in [i for i, m in enumerate(messages) if m["role"] == "assistant"]:
        until = template(messages[:i + 1], False)
        begin = begin_of_answer(messages, i, until, template) if whole.startswith(until) else None
        if begin is None or begin < at:
            if i + 1 == len(messages):
                raise Refusal(f"{place}: the chat template does not write message {i} behind what it writes before it; "
                              "give a tokenizer folder without it")
            others += 1
            continue
        found += [(whole[at:begin], False), (whole[begin:len(until)], True)]
        at = len(until)
    return [(text, target) for text, target in [*found, (whole[at:], False)] if text], others


def text_of(path):
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Refusal(f"{path}: {error}") from None


def json_of(path):
    """The object in a file of a tokenizer's folder; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(text_of(path))
    except ValueError as error:
        raise Refusal(f"{path}: not JSON ({error})") from None
    if not isinstance(content, dict):
        raise Refusal(f"{path}: no object of JSON")
    return content


def template_text(folder):
    """Source of the chat template in a tokenizer's folder, and its special tokens by name; empty if there is none."""
    config = json_of(folder / "tokenizer_config.json")
    if (folder / "chat_template.jinja").is_file():
        source = text_of(folder / "chat_template.jinja")
    else:
        source = config.get("chat_template") or json_of(folder / "chat_template.json").get("chat_template")
    if isinstance(source, list):  # several by name
        named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
        if "default" not in named:
            raise Refusal(f"{folder}: none of its chat templates is called default; write one to chat_template.jinja")
        source = named["default"]
    if source is not None and not isinstance(source, str):
        raise Refusal(f"{folder}: its chat template is no text")
    tokens = {**json_of(folder / "special_tokens_map.json"), **config}
    names = {}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = tokens.get(key)
        names[key] = token.get("content") if isinstance(token, dict) else token or ""
    return source, names


def load_template(source, names):
    """(messages, whether an answer is to follow) -> text, or None."""
    if source is None:
        return None
    try:
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise Refusal("the tokenizer brings a chat template, and jinja2 is missing; try pip install jinja2") from None

    class Generation(Extension):
        """Some templates mark what is an answer; it is written like the rest."""
        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    def refuse(message):
        raise Refusal(f"the chat template refuses a record: {message}")

    # What the Python package transformers lends to templates, but for today's date: the same chats give the same tokens.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[Generation, "jinja2.ext.loopcontrols"])
    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    try:
        compiled = environment.from_string(source)
    except Exception as error:  # a template is a program: what it throws is any of Python's
        raise bad_template(error) from None

    def write(messages, answer):
        try:
            return compiled.render(messages=messages, add_generation_prompt=answer, **names)
        except Refusal:
            raise
        except Exception as error:
            raise bad_template(error) from None

    return write


def bad_template(error):
    return Refusal(f"the chat template: {type(error).__name__}: {' '.join(str(error).split())}; "
                   "mend it, or give a tokenizer folder without it")


def pieces(record, place, template=None):
    """(text, is a target) of a record, in order, and how many answers are no targets."""
    if isinstance(record, dict):
        if isinstance(record.get("text"), str):
            return [(record["text"], True)], 0
        prompt, completion = record.get("prompt"), record.get("completion")
        if isinstance(prompt, str) and isinstance(completion, str):
            return [(prompt, False), (completion, True)], 0
        messages = record.get("messages")
        if isinstance(messages, list) and messages and all(
                isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
                for m in messages):
            return templated(messages, template, place) if template else (plain_chat(messages), 0)
    raise Refusal(f'{place}: a record needs "text", "prompt" and "completion", or "messages" with "role" and "content"')


def load_tokenizer(file):
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise Refusal("the Python package tokenizers is missing; try pip install tokenizers") from None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library throws nothing narrower
        raise Refusal(f"--tokenizer {file}: {error}") from None


def end_token(tokenizer, wanted):
    if wanted is not None:
        found = tokenizer.token_to_id(wanted)
        if found is None:
            raise Refusal(f"--end-token {wanted}: the tokenizer has no such token")
        return found
    return next((i for i in map(tokenizer.token_to_id, END_TOKENS) if i is not None), None)


def refuse_half_pairs(text, place):
    """JSON can write half of a surrogate pair, which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Refusal(f"{place}: \\u{ord(text[error.start]):04x} is half of a character; "
                      "write both halves of its pair, or leave it out") from None


def encode(tokenizer, record, place, end, template):
    """Token ids of a record and, for each, whether it is a target; and how many answers are none. The end is a target
    where what it ends is; a chat that a template wrote has an end of its own."""
    ids, mask = [], []
    parts, others = pieces(record, place, template)
    for text, target in parts:
        refuse_half_pairs(text, place)
        new = tokenizer.encode(text, add_special_tokens=False).ids
        ids += new
        mask += [int(target)] * len(new)
    if end is not None and not (template and "messages" in record):
        ids.append(end)
        mask.append(mask[-1] if mask else 1)
    return ids, mask, others


worker = {}


def work(connection, main_ends, options):
    """A worker process: does the jobs that come, and answers each with the result of do_part, or a failure to write. It
    closes its copies of the main process's ends of pipes, so that it ends when that process does."""
    for end in main_ends:
        end.close()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the main process ends its workers
    try:
        start_worker(options)
        while True:
            job = connection.recv()
            try:
                connection.send(do_part(job))
            except WriteFailure as failure:
                connection.send(failure)
    except Refusal as refusal:
        connection.send((None, str(refusal)))
    except (EOFError, ConnectionError):
        pass  # the main process was killed


@contextlib.contextmanager
def worker_processes(count, options, signals):
    """Worker processes by the connection to each; killed at the end of the block, where none of them writes any more.
    Each has a pipe of its own: with a shared queue, one that is killed could hold the lock that the others wait for."""
    workers = {}
    try:
        with signals.deferred():
            for _ in range(count):
                connection, other_end = multiprocessing.Pipe()
                process = multiprocessing.Process(target=work, args=(other_end, [*workers, connection], options), daemon=True)
                process.start()
                workers[connection] = process
                other_end.close()
        yield workers
    finally:
        with signals.deferred():
            for process in workers.values():
                process.kill()
            for process in workers.values():
                process.join()


def results(jobs, workers):
    """What do_part returns for each job, as it comes. There are no more workers than jobs."""
    waiting, busy = iter(jobs), set()
    try:
        for connection in workers:
            connection.send(next(waiting))
            busy.add(connection)
        while busy:
            for connection in multiprocessing.connection.wait(busy):
                result = connection.recv()
                if isinstance(result, WriteFailure):
                    raise result
                yield result
                job = next(waiting, None)
                if job is None:
                    busy.remove(connection)
                else:
                    connection.send(job)
    except (EOFError, ConnectionError):
        raise Refusal("a worker process was killed: often for want of memory; try fewer --workers") from None


def start_worker(options):
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    worker.update(options, tokenizer=load_tokenizer(options["tokenizer_file"]),
                  chat=load_template(*options["template"]))


def do_part(job):
    """Writes ids, mask and row lengths of one part; the description last, which makes it count."""
    index, part = job
    base = Path(worker["folder"]) / f"{index:06}"
    ids, mask, lengths = array.array("I"), bytearray(), array.array("I")
    cut = empty = untaught = 0
    try:
        for place, record in documents(part):
            new, targets, others = encode(worker["tokenizer"], record, place, worker["end"], worker["chat"])
            if worker["rows"]:
                longest = worker["row_length"] or len(new)
                cut += len(new) > longest
                new, targets = new[:longest], targets[:longest]
                if not any(targets[1:]):
                    empty += 1
                    continue
            untaught += others
            ids.extend(new)
            mask.extend(targets)
            lengths.append(len(new))
    except Refusal as error:
        return index, str(error)
    except OSError as error:
        return index, f"{part[0]}: {error}"
    done = {"tokens": len(ids), "records": len(lengths), "longest": max(lengths, default=0), "cut": cut,
            "without_target": empty, "targets": sum(mask), "untaught": untaught}
    with writing(base.parent):
        flush(f"{base}.ids", ids.tobytes())
        flush(f"{base}.mask", bytes(mask))
        flush(f"{base}.lengths", lengths.tobytes())
        flush(f"{base}.tmp", json.dumps(done).encode())
        os.replace(f"{base}.tmp", f"{base}.json")
    return index, None


# -- the whole ------------------------------------------------------------------------------------------------

def fingerprint(arguments, paths, tokenizer, template):
    """Two commands with the same one make the same parts."""
    facts = [arguments.layout, arguments.row_length, arguments.end_token, arguments.no_end_token,
             arguments.part_bytes, template, hashlib.sha256(tokenizer.read_bytes()).hexdigest(),
             [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in paths]]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def say(text):
    live = sys.stderr.isatty()
    print(f"\r\x1b[K{text}" if live else text, end="" if live else "\n", file=sys.stderr, flush=True)


def make_parts(folder, parts, options, workers, signals):
    missing = [(i, p) for i, p in enumerate(parts) if not (folder / f"{i:06}.json").exists()]
    done = len(parts) - len(missing)
    if done:
        say(f"going on with {len(missing)} of {len(parts)} parts")
    if not missing:
        return
    bytes_of = [end - begin for _, begin, end in parts]
    total, finished = sum(bytes_of), sum(bytes_of) - sum(bytes_of[i] for i, _ in missing)
    with worker_processes(min(workers, len(missing)), options, signals) as processes:
        for index, error in results(missing, processes):
            if error:
                raise Refusal(error)
            done += 1
            finished += bytes_of[index]
            say(f"{done} of {len(parts)} parts, {finished / max(total, 1):.0%} of {total / 1e6:.1f} MB")
    if sys.stderr.isatty():
        print(file=sys.stderr)


def read_array(path):
    values = array.array("I")
    values.frombytes(path.read_bytes())
    return values


def narrow(values, code):
    tokens = array.array(code, values)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()


def padded_rows(folder, index, row_length, padding):
    """Ids and mask of a part's records, each filled up to a row."""
    ids, mask = read_array(folder / f"{index:06}.ids"), (folder / f"{index:06}.mask").read_bytes()
    row_ids, row_mask, at = array.array("I"), bytearray(), 0
    for length in read_array(folder / f"{index:06}.lengths"):
        missing = row_length - length
        row_ids.extend(ids[at:at + length])
        row_ids.extend([padding] * missing)
        row_mask.extend(mask[at:at + length] + bytes(missing))
        at += length
    return row_ids, row_mask


def join(folder, count, code, layout, row_length, padding):
    """All parts in order into tokens.bin and mask.bin in the same folder; returns the number of tokens."""
    tokens = 0
    with (folder / "tokens.bin").open("wb") as bin_file, (folder / "mask.bin").open("wb") as mask_file:
        for index in range(count):
            if layout == "rows":
                ids, mask = padded_rows(folder, index, row_length, padding)
            else:
                ids, mask = read_array(folder / f"{index:06}.ids"), (folder / f"{index:06}.mask").read_bytes()
            bin_file.write(narrow(ids, code))
            mask_file.write(mask)
            tokens += len(ids)
        for file in (bin_file, mask_file):
            file.flush()
            os.fsync(file.fileno())
    return tokens


def prepare(arguments, signals):
    if arguments.row_length is not None and (arguments.layout != "rows" or arguments.row_length < 2):
        raise Refusal("--row-length: at least 2, and with --layout rows")
    outputs = Outputs(arguments.out)
    paths = find_inputs(arguments.inputs, outputs)
    source = tokenizer_file(arguments.tokenizer)
    tokenizer = load_tokenizer(source)
    end = None if arguments.no_end_token else end_token(tokenizer, arguments.end_token)
    vocabulary = tokenizer.get_vocab_size(with_added_tokens=True)
    template = template_text(source.parent)
    if any(is_records(path) for path in paths):
        load_template(*template)  # what is missing is said before any work
    parts = parts_of(paths, arguments.part_bytes)
    command = fingerprint(arguments, paths, source, template)[:16]
    with outputs.work_folder(command, signals) as folder:
        options = {"tokenizer_file": str(source), "folder": str(folder), "end": end, "rows": arguments.layout == "rows",
                   "row_length": arguments.row_length, "template": template}
        make_parts(folder, parts, options, arguments.workers, signals)
        description, total = build(folder, len(parts), arguments, end, vocabulary, source.name)
        outputs.publish(folder, is_masked(description["layout"], description["tokens"], description["targets"]), signals)
    for key, what in (("cut", "records cut at --row-length"), ("without_target", "records left out: without any target"),
                      ("untaught", "answers are no targets: the chat template rewrites them once others follow")):
        if total[key]:
            print(f"{total[key]} {what}", file=sys.stderr)
    print(f"{description['records']} records, {description['tokens']} tokens of {description['dtype']}, "
          f"{description['targets']} of them targets, in {outputs.tokens}")


def build(folder, count, arguments, end, vocabulary, tokenizer_name):
    """Writes the outputs into the work folder, from its parts. Returns the description and the sums over parts."""
    done = [json.loads((folder / f"{i:06}.json").read_text()) for i in range(count)]
    total = {key: sum(part[key] for part in done) for key in ("tokens", "records", "cut", "without_target", "targets", "untaught")}
    if total["tokens"] == 0:
        raise Refusal("no tokens: the inputs are empty, or no record has a target")
    rows = arguments.layout == "rows"
    row_length = arguments.row_length or max(2, max(part["longest"] for part in done))
    dtype, code = ("uint16", "H") if vocabulary <= 1 << 16 else ("uint32", "I")
    with writing(folder):
        tokens = join(folder, count, code, arguments.layout, row_length, end or 0)
        description = {"written_by": WRITER, "dtype": dtype, "vocab_size": vocabulary, "end_token": end,
                       "layout": arguments.layout, **({"row_length": row_length} if rows else {}), "tokens": tokens,
                       "targets": total["targets"], "records": total["records"], "tokenizer": tokenizer_name}
        flush(folder / "description.json", (json.dumps(description, indent=2) + "\n").encode())
    return description, total


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", help="files and folders")
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json, or a folder that holds one")
    parser.add_argument("--out", required=True, type=Path, metavar="NAME.bin",
                        help="the .bin to write; existing files are replaced only if this tool wrote them")
    parser.add_argument("--layout", choices=("stream", "rows"), default="stream", help="default stream")
    parser.add_argument("--row-length", type=int, metavar="TOKENS",
                        help="of rows: one more than train's --seq-len; longer records are cut (default: the longest)")
    parser.add_argument("--end-token", metavar="TOKEN", help="default: the tokenizer's own, by its usual names")
    parser.add_argument("--no-end-token", action="store_true", help="nothing between documents")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")
    parser.add_argument("--part-bytes", type=int, default=1 << 24, help="input of a part (default 16 MiB)")
    arguments = parser.parse_args()
    signals = Signals()
    try:
        if arguments.workers < 1 or arguments.part_bytes < 1:
            raise Refusal("--workers and --part-bytes must be at least 1")
        prepare(arguments, signals)
    except Refusal as refusal:
        print(f"prepare_data.py: error: {refusal}", file=sys.stderr)
        return 2
    except WriteFailure as failure:
        print(f"prepare_data.py: error: {failure}", file=sys.stderr)
        return 7
    except Interrupted as interrupted:
        number = interrupted.args[0]
        print(f"prepare_data.py: error: ended by {signal.Signals(number).name}: nothing was written; give the command again",
              file=sys.stderr)
        return 128 + number
    except OSError as error:
        print(f"prepare_data.py: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
