"""Files unpacked while they are read: gzip, and zstd by the package zstandard, which is imported when a file needs it."""
import contextlib
import gzip
import zlib

from .errors import Refusal
from .files import COMPRESSIONS

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
BLOCK = 1 << 20  # bytes


class ZstdStream:
    """Unpacked content of a binary stream of zstd frames. The package's own reader takes a file that is cut off for one that
    ends."""

    def __init__(self, raw, name):
        try:
            import zstandard
        except ImportError:
            raise Refusal(f"{name}: compressed by zstd, and the Python package zstandard is missing; "
                          "try pip install zstandard") from None
        self._raw, self._make, self._failure = raw, zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError
        self._frame, self._left = None, b""

    def read(self, size=-1):
        """At least one byte and mostly no more than `size`, or all; empty at the end."""
        blocks = []
        while block := self._block():
            blocks.append(block)
            if size >= 0:
                break
        return b"".join(blocks)

    def _block(self):
        while True:
            packed = self._left or self._raw.read(BLOCK)
            self._left = b""
            if not packed:
                if self._frame is not None:
                    raise EOFError("it ends within a frame")
                return b""
            if self._frame is None:
                self._frame = self._make()
            try:
                block = self._frame.decompress(packed)
            except self._failure as error:
                raise EOFError(str(error)) from None
            if self._frame.eof:
                self._left, self._frame = self._frame.unused_data, None
            if block:
                return block


def is_compressed(name):
    """Whether a file's first bytes say that it is compressed by gzip or zstd."""
    with opened(name, packed=True) as raw:
        return raw.read(4).startswith((GZIP, ZSTD))


@contextlib.contextmanager
def opened(name, packed=False):
    """The content of a file as a binary stream, unpacked where its first bytes say that it is packed, unless it is wanted
    `packed`. Errors of the block are refusals."""
    try:
        with open(name, "rb") as raw:
            first = b"" if packed else raw.read(4)
            raw.seek(0)
            suffix = next((s for s in COMPRESSIONS if str(name).lower().endswith(s)), None)
            if first.startswith(GZIP):
                with gzip.open(raw) as stream:
                    yield stream
            elif first == ZSTD:
                yield ZstdStream(raw, name)
            elif suffix and first:
                raise Refusal(f"{name}: not compressed as {suffix} is; rename it without {suffix}, or get it again")
            else:
                yield raw
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise Refusal(f"{name}: cannot be read: {error.strerror}; give rights to it, or leave it out") from None
        raise Refusal(f"{name}: cannot be unpacked: {error}; it is damaged or cut off: get it again") from None
