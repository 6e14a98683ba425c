"""Output files: recognition of those that this tool wrote, the work folder, and the renames at the end.

The outputs of `--out NAME.bin` are NAME.bin, NAME.json and NAME.mask.bin. NAME.parts is the work folder of a run, removed at
its end. An existing file counts as this tool's own where it is
- NAME.json: a description that this tool wrote, by its field "written_by", or, of older versions, by exactly their fields;
- NAME.bin or NAME.mask.bin: of the size that such a NAME.json gives;
- NAME.parts: a folder with the lock file of a run, or, of older versions, one that holds nothing but parts.
"""
import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import time

from .errors import Refusal, WriteFailure, writing

WRITER = "tandem prepare_data"
# Fields of a description as versions without "written_by" wrote it; "row_length" too where the layout is rows.
OLDER_FIELDS = {"dtype", "vocab_size", "end_token", "layout", "tokens", "targets", "records", "tokenizer"}
LONGEST_DESCRIPTION = 1 << 14  # bytes; they are some 300
TOKEN_BYTES = {"uint16": 2, "uint32": 4}
LOCK = "tandem-prepare_data.lock"
# In the work folder: a folder for the parts of one command, and the files in it.
COMMAND = re.compile(r"[0-9a-f]{16}")
PART = re.compile(r"\d{6,}\.(ids|mask|lengths|json|tmp)|(validation-)?(tokens\.bin|mask\.bin|description\.json)")


# -- recognition of own files ---------------------------------------------------------------------------------

def is_regular(path):
    """A file, and no link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def read_description(path):
    """The description in a NAME.json that this tool wrote; None of every other file."""
    try:
        if not is_regular(path) or path.stat().st_size > LONGEST_DESCRIPTION:
            return None
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    if content.get("written_by") != WRITER:
        rows = {"row_length"} if content.get("layout") == "rows" else set()
        if set(content) != OLDER_FIELDS | rows:
            return None
    counts = all(type(content.get(key)) is int for key in ("tokens", "targets"))
    known = content.get("dtype") in ("uint16", "uint32") and content.get("layout") in ("stream", "rows", "packed")
    return content if counts and known else None


def is_masked(layout, tokens, targets):
    """Whether a NAME.mask.bin belongs to the tokens."""
    return layout != "stream" or targets != tokens


def is_own_file(path):
    """Whether this tool wrote a NAME.json, NAME.bin or NAME.mask.bin."""
    if path.suffix == ".json":
        return read_description(path) is not None
    if path.suffix != ".bin" or not is_regular(path):
        return False
    mask = path.name.endswith(".mask.bin")
    base = path.with_suffix("") if mask else path
    description = read_description(base.with_suffix(".json"))
    if description is None:
        return False
    tokens = description["tokens"]
    if mask and not is_masked(description["layout"], tokens, description["targets"]):
        return False
    return path.stat().st_size == tokens * (1 if mask else TOKEN_BYTES[description["dtype"]])


def is_own_folder(path):
    """Whether this tool made a folder NAME.parts."""
    if path.suffix != ".parts" or path.is_symlink() or not path.is_dir():
        return False
    if is_regular(path / LOCK):
        return True
    commands = list(path.iterdir())  # folders that an older version made
    return bool(commands) and all(COMMAND.fullmatch(c.name) and c.is_dir() and not c.is_symlink() and
                                  all(PART.fullmatch(p.name) and is_regular(p) for p in c.iterdir()) for c in commands)


def is_own(path):
    """Whether a file or folder is an output of this tool, or lies in a work folder of it."""
    path = path.resolve()
    return is_own_file(path) or any(is_own_folder(p) for p in (path, *path.parents))


# -- outputs --------------------------------------------------------------------------------------------------

def identity(path):
    """Device and inode of what a path leads to; None where nothing is."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def validation_name(out):
    """Path of the validation set beside the token file `out`."""
    return out.with_name(f"{out.stem}-validation.bin")


class OutputFiles:
    """Paths of one token file and of what lies beside it, and their names in the work folder."""

    def __init__(self, tokens, prefix=""):
        self.tokens, self.description, self.mask = tokens, tokens.with_suffix(".json"), tokens.with_suffix(".mask.bin")
        self.built_tokens, self.built_mask = f"{prefix}tokens.bin", f"{prefix}mask.bin"
        self.built_description = f"{prefix}description.json"

    def paths(self):
        """The three paths."""
        return self.description, self.tokens, self.mask


class Outputs:
    """Outputs of one run: NAME.bin, with `validation` also NAME-validation.bin, and the work folder NAME.parts."""

    def __init__(self, out, validation=False):
        if out.suffix != ".bin" or out.name.endswith(".mask.bin"):
            raise Refusal(f"--out {out}: the name must end in .bin, and not in .mask.bin")
        self.tokens, self.parts = out, out.with_suffix(".parts")
        self.training = OutputFiles(out)
        self.validation = OutputFiles(validation_name(out), "validation-") if validation else None
        self.sets = [self.training] + ([self.validation] if validation else [])

    def paths(self):
        """Paths of all outputs and of the work folder."""
        return [*(path for files in self.sets for path in files.paths()), self.parts]

    def existing(self):
        """Path of each output that is there, by identity."""
        return {identity(p): p for p in self.paths() if identity(p)}

    def refuse_files_of_others(self):
        """Refuses where a file, folder or link in the place of an output is not this tool's own."""
        for path in self.paths():
            if not os.path.lexists(path):
                continue
            if path.is_symlink():
                why = "is a link"
            elif path == self.parts:
                # An empty one is left by a run that was killed as it began or ended, and holds nothing to lose.
                own = is_own_folder(path) or path.is_dir() and not any(path.iterdir())
                why = None if own else "is not written by this tool"
            elif path.is_dir():
                why = "is a folder"
            else:
                why = None if is_own_file(path) else "is not written by this tool"
            if why:
                raise Refusal(f"--out {self.tokens}: {path} {why}; name another --out, or move that away")

    def publish(self, built, masked, signals):
        """Moves the files in the folder `built` to their places; `masked` says of each set whether it has a mask. The files
        cannot be replaced in one step, and a kill may come between any two. The order is: remove each NAME.bin, then of each
        set remove the mask, replace the description, then the mask, then NAME.bin; the validation set first. A NAME.bin is
        absent while the others change, so no description stands beside the tokens of another run. A mask that is there
        always has the size that the description gives, so the next run recognises it as its own."""
        self.refuse_files_of_others()  # the work has taken its time
        signals.ignore()
        with writing(self.tokens):
            for files in self.sets:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(files.tokens)
            for files, has_mask in reversed(list(zip(self.sets, masked))):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(files.mask)
                os.replace(built / files.built_description, files.description)
                if has_mask:
                    os.replace(built / files.built_mask, files.mask)
                os.replace(built / files.built_tokens, files.tokens)

    def stale_validation(self):
        """NAME-validation.bin of an earlier run that this one does not replace, or None: its records are in NAME.bin too."""
        path = validation_name(self.tokens)
        description = None if self.validation else read_description(path.with_suffix(".json"))
        return path if description and description.get("validation_of") == self.tokens.name and path.exists() else None

    # -- work folder --

    @contextlib.contextmanager
    def work_folder(self, command, signals):
        """The folder NAME.parts/`command`, for this run alone; parts of the same command by a run that was killed are still in
        it. At the end of the block, also by an error or a signal, everything that this tool makes in NAME.parts is removed."""
        made = [p for p in (self.parts, *self.parts.parents) if not p.exists()]
        lock = None
        try:
            with signals.deferred():
                lock = self._lock()
                self._remove_parts(keep=command)
            folder = self.parts / command
            with writing(folder):
                folder.mkdir(exist_ok=True)
            yield folder
        finally:
            with signals.deferred():
                if lock is not None:
                    self._remove_parts()
                    os.close(lock)
                for path in made:
                    with contextlib.suppress(OSError):  # the folder may hold files
                        path.rmdir()

    def _lock(self):
        """Makes NAME.parts and locks it against other runs; the lock ends with the process and its workers. Returns the
        descriptor of the lock file."""
        path, begun = self.parts / LOCK, time.monotonic()
        while True:
            with writing(self.parts):
                self.parts.mkdir(parents=True, exist_ok=True)
                try:
                    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
                except FileNotFoundError:  # the run that held it has just removed the folder
                    lock = None
            if lock is not None:
                taken = try_lock(lock)
                if taken and identity(path) == (os.fstat(lock).st_dev, os.fstat(lock).st_ino):
                    os.truncate(lock, 0)
                    os.pwrite(lock, str(os.getpid()).encode(), 0)
                    return lock
                os.close(lock)
            # Workers outlive a killed run for a moment, which is long on a busy machine.
            if time.monotonic() - begun > (60 if has_ended(path) else 2):
                raise WriteFailure(f"--out {self.tokens}: another run is writing it; wait for that, or name another --out")
            time.sleep(0.05)

    def _remove_parts(self, keep=None):
        """Removes what this tool makes in NAME.parts, the lock file last, or all but the parts of the command `keep`. Other
        files stay, and the folders that hold them."""
        with writing(self.parts):
            for command in list(self.parts.iterdir()):
                if command.name == keep or not COMMAND.fullmatch(command.name) or command.is_symlink() or not command.is_dir():
                    continue
                for part in list(command.iterdir()):
                    if PART.fullmatch(part.name) and is_regular(part):
                        part.unlink()
                with contextlib.suppress(OSError):
                    command.rmdir()
            if keep is None:
                (self.parts / LOCK).unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    self.parts.rmdir()


def has_ended(lock_file):
    """Whether the process that a lock file names is there no more. Its workers may be."""
    try:
        os.kill(int(lock_file.read_bytes()), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError):
        pass
    return False


def try_lock(descriptor):
    """False where another process holds the lock. File systems without locks have them all taken."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    return True
