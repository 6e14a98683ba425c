"""Reading of tables, Parquet and Arrow, by the package pyarrow, which is imported when the first one is read."""
import contextlib

from .errors import Refusal


def arrow_package(name):
    """The package pyarrow with its parts; refuses where it is missing."""
    try:
        import pyarrow
        import pyarrow.feather
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise Refusal(f"{name}: needs the Python package pyarrow; try pip install pyarrow") from None
    return pyarrow


@contextlib.contextmanager
def table_reading(name):
    """Errors of pyarrow in the block as refusals."""
    pyarrow = arrow_package(name)
    try:
        yield pyarrow
    except UnicodeDecodeError as error:
        raise Refusal(f"{name}: text in it is not UTF-8 ({error.reason} 0x{error.object[error.start]:02x}); "
                      "write it again") from None
    except (OSError, pyarrow.ArrowException) as error:
        raise Refusal(f"{name}: not a whole file of its kind ({' '.join(str(error).split())[:200]}); "
                      "get it again, or write it again") from None


def row_groups(name):
    """Row groups of a Parquet file."""
    return parquet(name).num_row_groups


def parquet(name):
    """An opened Parquet file."""
    with table_reading(name) as pyarrow:
        return pyarrow.parquet.ParquetFile(name)


def rows_before(part):
    """Records of a table before the part's."""
    if part.kind == "arrow":
        return 0
    metadata = parquet(part.file).metadata
    return sum(metadata.row_group(i).num_rows for i in range(part.begin))


def without_nulls(value):
    """A value of a table without null fields: in a column of structs a field that one record has all have, as null."""
    if isinstance(value, dict):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value


def table_records(part):
    """(number from 1, record) of each record of a part of a table."""
    number = 0
    with table_reading(part.file) as pyarrow:
        for batch in batches(pyarrow, part):
            for record in batch.to_pylist(maps_as_pydicts="strict"):
                number += 1
                yield number, without_nulls(record)


def batches(pyarrow, part):
    """Batches of records, read by this thread alone: workers are the parallelism."""
    if part.kind == "parquet":
        file = pyarrow.parquet.ParquetFile(part.file)
        yield from file.iter_batches(batch_size=256, row_groups=list(range(part.begin, part.end)), use_threads=False)
        return
    with open(part.file, "rb") as raw:
        if raw.read(6) == b"ARROW1":
            reader = pyarrow.ipc.open_file(part.file)
            yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
        elif part.file.lower().endswith(".feather"):
            yield from pyarrow.feather.read_table(part.file, use_threads=False).to_batches(max_chunksize=256)
        else:
            raw.seek(0)
            yield from pyarrow.ipc.open_stream(raw)
