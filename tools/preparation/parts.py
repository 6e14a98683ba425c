"""Parts in parallel: worker processes, and the files of each part in the work folder."""
import array
import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
from collections import Counter
from pathlib import Path

from .errors import Fault, Refusal, WriteFailure, fault_of, flush, writing
from .inputs import records_of
from .pipeline import Pipeline
from .preferences import SIDES
from .records import KNOWN_ROLES

COUNTS = ("tokens", "records", "targets", "cut", "cut_off", "without_target", "untaught", "dropped", "unknown_roles",
          "tools_dropped", "quoted", "open_ended", "joined", "doubled")
LARGEST = ("longest", "uncut", "largest")  # kept and whole records in tokens, and the largest id
FIRST = ("first_dropped", "first_unknown_role")  # places of the first messages of which something is told

FORK = multiprocessing.get_context("fork")  # a worker has the main process's modules, and its copies of pipes to close
worker = {}


def work(connection, main_ends, options):
    """A worker process: does the jobs that come, and answers each with the result of do_part, or a failure to write. It
    closes its copies of the main process's ends of pipes, so that it ends when that process does."""
    for end in main_ends:
        end.close()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the main process ends its workers
    try:
        worker.update(options, pipeline=Pipeline(**options["pipeline"]))
        while True:
            job = connection.recv()
            try:
                connection.send(do_part(job))
            except WriteFailure as failure:
                connection.send(failure)
            except MemoryError:
                connection.send((job[0], f"{job[1].file}: too little memory; try fewer --workers"))
            except Exception as error:
                connection.send(fault_of(error))
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
                arguments = (other_end, [*workers, connection], options)
                process = FORK.Process(target=work, args=arguments, daemon=True)
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
    """Results of do_part for the jobs, in the order in which they end. There are no more workers than jobs."""
    waiting, busy = iter(jobs), set()
    try:
        for connection in workers:
            connection.send(next(waiting))
            busy.add(connection)
        while busy:
            for connection in multiprocessing.connection.wait(busy):
                result = connection.recv()
                if isinstance(result, (WriteFailure, Fault)):
                    raise result
                yield result
                job = next(waiting, None)
                if job is None:
                    busy.remove(connection)
                else:
                    connection.send(job)
    except (EOFError, ConnectionError):
        raise Refusal("a worker process was killed: often for want of memory; try fewer --workers") from None


class PartFiles:
    """Ids, mask and row lengths of one part while it is made."""

    def __init__(self, rows, row_length, pairs=False):
        self.rows, self.row_length, self.pairs = rows, row_length, pairs
        self.ids, self.mask, self.lengths = array.array("I"), bytearray(), array.array("I")
        self.counts, self.forms, self.first, self.uncut = Counter(), Counter(), dict.fromkeys(FIRST), 0

    def add_all(self, prepared, place):
        """Takes what Pipeline.prepare_all makes; refuses a pair among other records, and one that rows would cut."""
        if (len(prepared) == 2) != self.pairs:
            raise Refusal(f"{place}: preferences and other records are mixed; prepare each kind to a file of its own")
        for side, record in zip(SIDES, prepared) if self.pairs else ():
            length = len(record.encoded.ids)
            if length > (self.row_length or length):
                raise Refusal(f"{place}: field {side}: the answer is cut off by --row-length {self.row_length}, prompt and answer have "
                              f"{length} tokens; give a larger one, or leave the record out")
        for record in prepared:
            self.add(record, place)

    def add(self, prepared, place):
        """Takes a Prepared record; counts it, and leaves it out where a row would have no target."""
        ids, mask, found = prepared.encoded.ids, prepared.encoded.mask, prepared.targets
        self.forms[prepared.form] += 1
        self.uncut = max(self.uncut, len(ids))
        whole = mask
        if self.rows:
            longest = self.row_length or len(ids)
            self.counts["cut"] += len(ids) > longest
            ids, mask = ids[:longest], mask[:longest]
        learnt = any(mask[1:]) if self.rows else any(mask)
        self.counts["without_target"] += not learnt
        self.counts["cut_off"] += self.rows and not learnt and any(whole[1:])
        for role, name in zip(prepared.roles, prepared.names):
            if role not in KNOWN_ROLES:
                self.counts["unknown_roles"] += 1
                self.first["first_unknown_role"] = self.first["first_unknown_role"] or f"{place}: {name}, role {json.dumps(role)}"
        self.counts["doubled"] += prepared.encoded.doubled
        if found:
            self.counts.update(dropped=len(found.dropped), tools_dropped=found.tools_dropped, quoted=found.quoted,
                               open_ended=found.open_ended, joined=found.joined)
            if found.dropped and not self.first["first_dropped"]:
                self.first["first_dropped"] = f"{place}: {prepared.names[found.dropped[0]]}"
        if self.rows and not learnt:
            return
        self.counts["untaught"] += found.untaught if found else 0
        self.ids.extend(ids)
        self.mask.extend(mask)
        self.lengths.append(len(ids))

    def write(self, base):
        """Writes the files; the description last, which makes the part count."""
        self.counts.update(tokens=len(self.ids), records=len(self.lengths), targets=sum(self.mask))
        done = {**{key: self.counts[key] for key in COUNTS}, "longest": max(self.lengths, default=0),
                "uncut": self.uncut, "largest": max(self.ids, default=0), "forms": dict(self.forms), **self.first}
        with writing(base.parent):
            flush(f"{base}.ids", self.ids.tobytes())
            flush(f"{base}.mask", bytes(self.mask))
            flush(f"{base}.lengths", self.lengths.tobytes())
            flush(f"{base}.tmp", json.dumps(done).encode())
            os.replace(f"{base}.tmp", f"{base}.json")


def do_part(job):
    """Makes one part. Returns its index, and a line where it is refused."""
    index, part = job
    made = PartFiles(worker["rows"], worker["row_length"], worker["pairs"])
    try:
        for place, raw in records_of(part):
            made.add_all(worker["pipeline"].prepare_all(raw, place), place)
    except Refusal as error:
        return index, str(error)
    made.write(Path(worker["folder"]) / f"{index:06}")
    return index, None


def say(text):
    """A line of progress on standard error, in place on a terminal."""
    live = sys.stderr.isatty()
    print(f"\r\x1b[K{text}" if live else text, end="" if live else "\n", file=sys.stderr, flush=True)


def make_parts(folder, parts, options, workers, signals):
    """Makes the parts that are not yet in the work folder; raises Refusal for the first record that is refused."""
    missing = [(i, p) for i, p in enumerate(parts) if not (folder / f"{i:06}.json").exists()]
    done = len(parts) - len(missing)
    if done:
        say(f"going on with {len(missing)} of {len(parts)} parts")
    if not missing:
        return
    total, finished = sum(p.size for p in parts), sum(p.size for p in parts) - sum(p.size for _, p in missing)
    with worker_processes(min(workers, len(missing)), options, signals) as processes:
        for index, error in results(missing, processes):
            if error:
                raise Refusal(error)
            done += 1
            finished += parts[index].size
            say(f"{done} of {len(parts)} parts, {finished / max(total, 1):.0%} of {total / 1e6:.1f} MB")
    if sys.stderr.isatty():
        print(file=sys.stderr)


def totals(folder, count):
    """Sums and maxima over the descriptions of all parts, and the first of FIRST in them."""
    done = [json.loads((folder / f"{i:06}.json").read_text()) for i in range(count)]
    forms = Counter()
    for part in done:
        forms.update(part["forms"])
    return {**{key: sum(part[key] for part in done) for key in COUNTS},
            **{key: max((part[key] for part in done), default=0) for key in LARGEST}, "forms": dict(forms),
            **{key: next((part[key] for part in done if part[key]), None) for key in FIRST}}
