#!/usr/bin/env python3
"""Shows that check_classes.py can fail: plants long classes in a small tree, in every way in which one may be spread.

Usage: planted_classes.py

A class of 500 lines must pass; with a line more it must be reported, with its name and length. What belongs to no class,
or to another of the same name, must not count.
"""
import sys
import tempfile
from pathlib import Path

import check_classes
from planted_report import report

NAME = "Planted"


def lines(count, indent=""):
    return f"{indent}int a = 0;\n" * count


def body(name, count, word="class"):
    """A definition of `count` lines."""
    return f"{word} {name} {{\n{lines(count - 2, '  ')}}};\n"


def member(name, count):
    return f"void {name}() {{\n{lines(count - 2, '  ')}}}\n"


def in_namespace(text, name="tandem"):
    return f"namespace {name} {{\n\n{text}\n}}  // namespace {name}\n"


TRICKS = r'''
#define OPEN {
#define LONG(x) \
  { x
// A comment { with 'one quote, and "another
/* and { one of
   several lines */
constexpr const char* text = "{ \" { \\";
constexpr const char* raw = R"x({ " )" )x";
constexpr char brace = '{', quote = '\'';
constexpr int number = 1'000'000;
enum class Color : unsigned char { red, green };
template <class T, class = std::enable_if_t<(sizeof(T) > 1)>>
struct Trait { static constexpr bool value = true; };
template <>
struct Trait<int> final : Base<int> { int x{1}; } trait;
extern "C" { void f(); }
auto lambda = [](int x) { return x < 2 ? std::vector<int>{1, 2} : std::vector<int>{}; };
std::vector<std::pair<int, int>> table{{1, 2}, {3, 4}};
inline bool operator<(const Key& a, const Key& b) { return a.k < b.k; }
class Forward;
struct Forward* pointer_to(struct Forward& x) { return &x; }
'''
# Behind the tricks; what it says belongs to Planted must be found there.
INITIALIZERS = """Planted::Planted(int x)
    : a_(x), b_{x, [] { return 1; }()}, Base<int>{x} {
%s}
"""

# name of the case, files by path, lines that Planted must be found to have in its longest
CASES = [
    ("a body", {"core/a/p.hpp": in_namespace(body(NAME, 501))}, 501),
    ("a body that is just short enough", {"core/a/p.hpp": in_namespace(body(NAME, 500))}, 500),
    ("a struct without a namespace", {"core/a/p.hpp": body(NAME, 501, "struct")}, 501),
    ("a class with a base, a macro and an attribute",
     {"core/a/p.hpp": in_namespace(f"class [[nodiscard]] API {NAME} final : public Base<int> {{\n{lines(499)}}};\n")}, 501),
    ("a template", {"core/a/p.hpp": in_namespace(f"template <class T>\nclass {NAME} {{\n{lines(498)}}};\n")}, 501),
    ("members in several files",
     {"core/a/p.hpp": in_namespace(body(NAME, 101)), "core/a/p.cpp": in_namespace(member(f"{NAME}::run", 200)),
      "core/b/q.cpp": in_namespace(member(f"{NAME}::stop", 200))}, 501),
    ("a nested class", {"core/a/p.hpp": in_namespace(f"class {NAME} {{\n{body('Inner', 499)}}};\n")}, 501),
    ("members of a nested class",
     {"core/a/p.hpp": in_namespace(body(NAME, 10)), "core/a/p.cpp": in_namespace(member(f"{NAME}::Inner::run", 491))}, 501),
    ("what is behind a pointer",
     {"core/a/p.hpp": in_namespace(body(NAME, 10)), "core/a/impl.hpp": in_namespace(body(f"{NAME}::Impl", 300, "struct")),
      "core/a/p.cpp": in_namespace(member(f"{NAME}::Impl::run", 191))}, 501),
    ("a constructor with initializers in braces",
     {"core/a/p.hpp": in_namespace(body(NAME, 10)), "core/a/p.cpp": in_namespace(INITIALIZERS % lines(488))}, 501),
    ("a destructor, an operator and a conversion",
     {"core/a/p.hpp": in_namespace(body(NAME, 10)),
      "core/a/p.cpp": in_namespace(f"{NAME}::~{NAME}() {{\n{lines(98)}}}\nint {NAME}::operator()(int x) const {{\n{lines(98)}}}\n"
                                   f"bool {NAME}::operator<(const {NAME}& o) const noexcept {{\n{lines(98)}}}\n"
                                   f"{NAME}::operator bool() const {{\n{lines(98)}}}\n"
                                   f"auto {NAME}::f(int x) -> std::vector<int> {{\n{lines(89)}}}\n")}, 501),
    ("a member of a template, with a comment",
     {"core/a/p.hpp": in_namespace(body(NAME, 10)),
      "core/a/p.cpp": in_namespace(f"/// One.\n/// Two.\ntemplate <class Body>\nstd::map<int, int> {NAME}<Body>::each(Body b) {{\n"
                                   f"{lines(486)}}}\n")}, 501),
    ("behind what is hard to read", {"core/a/p.hpp": TRICKS + in_namespace(TRICKS + body(NAME, 501))}, 501),
    ("named with its namespace",
     {"core/a/p.hpp": in_namespace(body(NAME, 10)), "core/a/p.cpp": member(f"tandem::{NAME}::run", 491)}, 501),
    ("an unnamed namespace", {"core/a/p.cpp": in_namespace(f"namespace {{\n{body(NAME, 501)}}}\n")}, 501),
    ("a public header and its module",
     {"include/tandem/p.hpp": in_namespace(body(NAME, 10)), "api/p.cpp": in_namespace(member(f"{NAME}::run", 491))}, 501),
    # Parts of a file that do not count.
    ("functions beside it", {"core/a/p.hpp": in_namespace(body(NAME, 10) + member("run", 600))}, 10),
    ("functions of a namespace", {"core/a/p.hpp": in_namespace(body(NAME, 10) + member("other::run", 600))}, 10),
    ("another module",
     {"core/a/p.hpp": in_namespace(body(NAME, 300)), "io/p.hpp": in_namespace(body(NAME, 299))}, 300),
    ("two of a name in unnamed namespaces",
     {"core/a/p.cpp": in_namespace(f"namespace {{\n{body(NAME, 300)}}}\n"),
      "core/a/q.cpp": in_namespace(f"namespace {{\n{body(NAME, 299)}}}\n")}, 300),
    ("a member of the other namespace",
     {"core/a/p.hpp": in_namespace(body(NAME, 300)) + in_namespace(body(NAME, 10), "other"),
      "core/a/p.cpp": in_namespace(member(f"{NAME}::run", 250), "other")}, 300),
]


def check(files, known=None):
    """Violations, and the lines of the longest class of that name."""
    check_classes.KNOWN = known or {}
    with tempfile.TemporaryDirectory(prefix="tandem_classes_") as folder:
        root = Path(folder)
        (root / "core").mkdir()
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text, encoding="utf-8")
        classes, violations = check_classes.check(root)
    return violations, max((c.lines for c in classes if c.name == NAME), default=0)


def try_case(what, files, expected):
    violations, found = check(files)
    if found != expected:
        return f"{what}: found {found} lines, not {expected}"
    reported = any(f": class: {NAME} has {expected} lines" in v for v in violations)
    if reported != (expected > check_classes.LONGEST_CLASS) or len(violations) > 1:
        return f"{what}: reported {violations}"
    return None


def try_known(lines_of_it, ceiling, expected):
    """A class of the list of exceptions."""
    files = {"core/a/p.hpp": in_namespace(body(NAME, lines_of_it))} if lines_of_it else {}
    violations, _ = check(files, {f"core/{NAME}": ceiling})
    text = "\n".join(violations)
    passed = not violations if expected is None else len(violations) == 1 and expected in text
    return None if passed else f"known with {ceiling} and {lines_of_it} lines long: reported {violations}"


def try_unbalanced():
    violations, _ = check({"core/a/p.hpp": "namespace tandem {\nclass X {\n"})
    found = len(violations) == 1 and ": class: brackets that do not match" in violations[0]
    return None if found else f"missed brackets that do not match: {violations}"


def main():
    outcomes = [try_case(*case) for case in CASES]
    outcomes += [
        try_known(600, 600, None),
        try_known(601, 600, f"{NAME} has 601 lines"),
        try_known(500, 600, f"core/{NAME} need not be in KNOWN any more"),
        try_known(0, 600, f"core/{NAME} need not be in KNOWN any more"),
        try_unbalanced(),
    ]
    return report(outcomes)


if __name__ == "__main__":
    sys.exit(main())
