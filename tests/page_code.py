"""Code of a page of the documentation, block after block, as it stands there."""
import contextlib
import io
import os
import re

BLOCK = re.compile(r"^```(python|py)\n(.*?)^```$", re.M | re.S)


def blocks(page):
    """Language, line of the page and code of each block: those marked `python` run, those marked `py`, which need more than a test has,
    compile."""
    text = page.read_text()
    return [(found.group(1), text[:found.start(2)].count("\n"), found.group(2)) for found in BLOCK.finditer(text)]


def run_all(page, folder, change=lambda code: code):
    """Names that the blocks have defined. Lines of errors are those of the page."""
    names = {}
    before = os.getcwd()
    os.chdir(folder)
    try:
        for language, line, code in blocks(page):
            compiled = compile("\n" * line + change(code), str(page), "exec")
            if language == "python":
                with contextlib.redirect_stdout(io.StringIO()):
                    exec(compiled, names)
    finally:
        os.chdir(before)
    return names
