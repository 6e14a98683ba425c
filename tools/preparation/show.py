"""Records as the model will see them, for people: what is read and what is learnt, with control characters made visible."""
import itertools
import unicodedata

LONGEST = 600  # characters of a stretch that are shown


def visible(text):
    """A text without characters that a terminal would obey."""
    marks = {"\n": "\u23ce\n", "\t": "\u2409"}
    return "".join(marks.get(c) or (c if c == " " or unicodedata.category(c)[0] not in "CZ" else
                                    f"\\u{ord(c):04x}" if ord(c) < 0x10000 else f"\\U{ord(c):08x}") for c in text)


def shortened(text):
    """A text without its middle where it is long."""
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]} [... {len(text) - LONGEST} characters ...] {text[-half:]}"


def stretches(prepared, tokenizer, longest):
    """(whether it is learnt, text) of runs of the first `longest` tokens with the same mask; tokens that stand for no text are
    written by name."""
    encoded, at = prepared.encoded, 0
    tokens = itertools.islice(zip(encoded.ids, encoded.mask, encoded.offsets), longest)
    for learnt, run in itertools.groupby(tokens, key=lambda token: token[1]):
        pieces = []
        for i, _, (begin, end) in run:
            if (begin, end) == (0, 0):
                pieces.append(tokenizer.id_to_token(i) or "")
            elif end > at:  # tokens of one character share its offsets
                pieces.append(prepared.text[at:end])
                at = end
        yield bool(learnt), "".join(pieces)


def described(prepared, place, tokenizer, row_length=None):
    """Lines that show a record: the format, how many tokens, each stretch as context or as TARGET, and where rows cut it."""
    encoded = prepared.encoded
    roles = f", roles {' '.join(dict.fromkeys(prepared.roles))}" if prepared.roles else ""
    yield (f"{place}: {prepared.form}{roles}: {len(encoded.ids)} tokens, {sum(encoded.mask)} of them targets")
    for learnt, text in stretches(prepared, tokenizer, row_length):
        label = "TARGET " if learnt else "context"
        for number, line in enumerate(visible(shortened(text)).removesuffix("\n").split("\n")):
            yield f"  {label if number == 0 else ' ' * len(label)} | {line}"
    beyond = encoded.mask[row_length:] if row_length else []
    if beyond:
        left = "" if any(encoded.mask[1:row_length]) else "; without a target before it, the record is left out"
        yield f"  (cut here by --row-length {row_length}: {len(beyond)} tokens behind it, {sum(beyond)} of them targets{left})"
