"""A tokenizer as records need it: its end token, its special tokens, and one encoding of a text with its targets."""
import os
import sys
from collections import namedtuple

from .errors import Refusal

# End tokens of published models, tried where a tokenizer's folder names none.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>")

# Classes of transformers, without "Fast", that set these settings of tokenizer.json anew: from tokenizer_config.json, or to
# the default here where that says nothing.
PREFIX_SPACE = {f"{name}Tokenizer": {"add_prefix_space": False} for name in (
    "GPT2", "GPTNeoX", "CodeGen", "Whisper", "Roberta", "Longformer", "Bart", "LED", "Mvp", "Deberta")}
BERT = {f"{name}Tokenizer": {"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": True} for name in (
    "Bert", "DistilBert", "Electra", "MobileBert", "MPNet", "Funnel", "LayoutLM", "Lxmert", "SqueezeBert")}
# Names of settings in tokenizer.json, where they differ.
OWN_NAMES = {"do_lower_case": "lowercase", "tokenize_chinese_chars": "handle_chinese_chars"}

EndToken = namedtuple("EndToken", "id text source")


class Encoded:
    """ids, and a mask of 0 and 1, of equal length. doubled: whether a beginning token was left out, as the text begins with
    it."""

    def __init__(self, encoding, mask, before=(), after=(), doubled=False):
        """`mask`: of all tokens. `before`, `after`: ids around those of the text."""
        self.ids, self.mask, self.doubled = [*before, *encoding.ids, *after], mask, doubled
        self._encoding, self._around = encoding, (len(before), len(after))

    @property
    def offsets(self):
        """(begin, end) of each token in characters of the text, (0, 0) of tokens that stand for none of it."""
        before, after = self._around
        return [(0, 0)] * before + list(self._encoding.offsets) + [(0, 0)] * after


def load_tokenizer(folder):
    """The tokenizer of a TokenizerFolder, as transformers would load it, without its saved truncation and padding.

    Returns it, the special tokens that it takes from the folder's other files and that tokenizer.json has no id for, and
    settings in which tokenizer_config.json overrides it."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are the parallelism
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise Refusal(f"the Python package tokenizers is missing; try {sys.executable} -m pip install tokenizers") from None
    try:
        tokenizer = Tokenizer.from_file(str(folder.file))
    except Exception as error:  # the library throws nothing narrower
        raise Refusal(f"--tokenizer {folder.file}: {' '.join(str(error).split())}; get the file again") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, add_tokens(tokenizer, folder), override(tokenizer, folder)


def override(tokenizer, folder):
    """Sets what the class in tokenizer_config.json sets in transformers; returns (setting, value, that of tokenizer.json) of
    each that was another."""
    name = folder.config.get("tokenizer_class")
    name = name.removesuffix("Fast") if isinstance(name, str) else ""
    changed = []
    for classes, holder, kind in ((PREFIX_SPACE, "pre_tokenizer", "ByteLevel"), (BERT, "normalizer", "BertNormalizer")):
        part = getattr(tokenizer, holder) if name in classes else None
        for setting, default in classes[name].items() if type(part).__name__ == kind else ():
            own = OWN_NAMES.get(setting, setting)
            value, before = folder.config.get(setting, default), getattr(part, own)
            if not isinstance(value, bool) and (value, default) != (None, None):
                raise Refusal(f"{folder.path / 'tokenizer_config.json'}: {setting}: true or false was expected; mend it")
            setattr(part, own, value)
            # Accents that nothing is said of are stripped where letters are lowered.
            value, before = (getattr(part, "lowercase") if v is None else v for v in (value, before))
            if value != before:
                changed.append((setting, value, before))
    return changed


def add_tokens(tokenizer, folder):
    """Adds the special tokens of the folder's other files, and returns those that are new to the vocabulary."""
    wanted = [(token["content"], token) for token in folder.added_tokens()]
    wanted += [(content, {}) for content in (*folder.special_tokens().values(), *folder.extra_tokens())]
    if not wanted:
        return []
    from tokenizers import AddedToken
    present = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    named = set(folder.special_tokens().values())
    new = []
    for content, flags in wanted:
        known = {key: bool(flags[key]) for key in ("single_word", "lstrip", "rstrip", "normalized", "special") if key in flags}
        token = AddedToken(content, **{"special": content in named or not flags, **known})
        if content in present and (not flags or repr(present[content]) == repr(token)):
            continue
        if tokenizer.token_to_id(content) is None:
            new.append(content)
        tokenizer.add_tokens([token])
        present[content] = token
    return new


def find_end_token(tokenizer, folder, wanted, new=()):
    """The EndToken that `wanted` names, else the folder, else a usual name; None where there is none. Of the folder's, an id
    that the tokenizer does not have is passed over; a token that it does not have, of `new`, is refused."""
    if wanted is not None:
        if tokenizer.token_to_id(wanted) is None or wanted in new:
            raise Refusal(f"--end-token {wanted}: the tokenizer has no such token; name one of its tokens")
        return EndToken(tokenizer.token_to_id(wanted), wanted, "--end-token")
    for token, source in folder.end_tokens():
        text = token if isinstance(token, str) else tokenizer.id_to_token(token)
        if text is None:
            continue
        if tokenizer.token_to_id(text) is None or text in new:
            raise Refusal(f"{source}: {text!r} is no token of {folder.file.name}; name one with --end-token, or give "
                          "--no-end-token")
        return EndToken(tokenizer.token_to_id(text), text, source)
    text = next((t for t in END_TOKENS if tokenizer.token_to_id(t) is not None), None)
    return text and EndToken(tokenizer.token_to_id(text), text, "its usual name: the tokenizer's folder names none")


def mask_of(offsets, spans, strict=False):
    """1 for each token that overlaps one of `spans`, else 0. Spans are (begin, end) in characters, in order and disjoint.
    A token without characters of its own belongs to what follows it; with `strict` it is no target at a span's begin, as in
    transformers."""
    mask, i = [], 0
    for begin, end in offsets:
        while i < len(spans) and begin >= spans[i][1]:
            i += 1
        first = spans[i][0] if i < len(spans) else None
        mask.append(int(first is not None and (end > first or not strict and begin == end == first)))
    return mask


def encode(tokenizer, text, place, add_special_tokens=False):
    """The library's encoding of a text. What it throws is a refusal: also its panics, which are no Exception."""
    try:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise Refusal(f"{place}: the tokenizer cannot encode the text: {' '.join(str(error).split())}; give another "
                      "tokenizer, or leave the record out") from None


def refuse_half_pairs(text, place):
    """JSON can write half of a surrogate pair, which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Refusal(f"{place}: \\u{ord(text[error.start]):04x} is half of a character; "
                      "write both halves of its pair, or leave it out") from None


class Encoder:
    """Encodes texts whole. `end`: an EndToken or None. `special_tokens`: whether texts get those of the tokenizer."""

    def __init__(self, tokenizer, end=None, special_tokens=True):
        self.tokenizer, self.end = tokenizer, end
        # The tokenizer's post-processor adds special tokens, and may trim spaces from offsets. Texts are encoded without it.
        self._post_processor = tokenizer.post_processor
        self.before, self.after = self._special_tokens() if special_tokens else ([], [])
        tokenizer.post_processor = None
        self.added = sorted((t.content for t in tokenizer.get_added_tokens_decoder().values()), key=len, reverse=True)

    def _special_tokens(self):
        """Ids that the post-processor writes before and behind a text."""
        if self._post_processor is None:
            return [], []
        encoding = encode(self.tokenizer, "a", "--tokenizer", True)
        own = encoding.special_tokens_mask
        before = next((i for i, special in enumerate(own) if not special), len(own))
        after = next((i for i, special in enumerate(reversed(own)) if not special), 0)
        if any(own[before:len(own) - after]):
            raise Refusal("the tokenizer writes special tokens inside a text; give --no-special-tokens")
        return encoding.ids[:before], encoding.ids[len(own) - after:]

    def text(self, text, place, spans=None, end_learnt=True):
        """Encodes a text that no template wrote: with the tokenizer's special tokens and the end token. `spans` are targets,
        or all where it is None; `end_learnt` says whether the tokens that end the text are."""
        refuse_half_pairs(text, place)
        encoding = encode(self.tokenizer, text, place)
        ids = encoding.ids
        mask = [1] * len(ids) if spans is None else mask_of(encoding.offsets, spans)
        before = self.before
        doubled = bool(before) and ids[:len(before)] == before
        if doubled:
            before = []
        after = list(self.after)
        if self.end is not None and (after or ids)[-1:] != [self.end.id]:
            after.append(self.end.id)
        mask = [int(spans is None)] * len(before) + mask + [int(end_learnt)] * len(after)
        return Encoded(encoding, mask, before, after, doubled)

    def chat(self, text, place, spans, marked):
        """Encodes a chat as its template wrote it, without further tokens. `marked`: whether the template marks its answers;
        then the targets are exactly those of transformers, by the tokenizer's own offsets."""
        refuse_half_pairs(text, place)
        if marked:
            self.tokenizer.post_processor = self._post_processor
        encoding = encode(self.tokenizer, text, place)
        if marked:
            self.tokenizer.post_processor = None
        return Encoded(encoding, mask_of(encoding.offsets, spans, marked))
