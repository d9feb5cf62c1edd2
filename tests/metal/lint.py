"""Rules of Metal's language, and of ours, that clang's C++ does not know.

Works on the text without comments: our kernels are plain enough for that, and
what it cannot read it reports. docs/metal.md lists what nobody checks.
"""

from __future__ import annotations

import re

# word: why it is not in our kernels
BANNED = {
    "double": "MSL has no double",
    "long double": "MSL has no double",
    "goto": "not in MSL",
    "throw": "no exceptions in MSL",
    "try": "no exceptions in MSL",
    "catch": "no exceptions in MSL",
    "new": "not in MSL",
    "delete": "not in MSL",
    "virtual": "not in MSL",
    "dynamic_cast": "not in MSL",
    "typeid": "not in MSL",
    "asm": "not in MSL",
    "thread_local": "not in MSL",
    "static": "no static variables in MSL functions",
    "std": "no std:: in MSL",
    "thread_elements": "which lane holds what is not specified",
    "clamp": "loses NaN",
    "fast": "angles and sums need precise functions",
    "precise": "no transcendental functions belong in these kernels",
}
PATTERNS = (
    (r"\bsimd_\w+", "simd functions are not emulated"),
    (r"\batomic\w*", "atomics are not emulated"),
    (r"\bif\s+constexpr\b", "C++17, which Apple accepts as an extension only"),
    (r"(?<![\w.])(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w.])", "a literal without f is float in "
     "MSL and double elsewhere: write the f"),
    (r"[=(,]\s*\[[&=\w, ]*\]\s*[({]", "lambdas need Metal 4"),
    (r"\(\s*\*\s*\w+\s*\)\s*\(", "no function pointers in MSL"),
)  # fmt: skip
_SPACES = r"\b(?:device|constant|threadgroup|thread)\b"


def without_comments(text: str) -> str:
    """Comments and string contents blanked, lines kept."""

    def blank(m: re.Match[str]) -> str:
        return '""' if m[0].startswith('"') else re.sub(r"[^\n]", " ", m[0])

    return re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"', blank, text, flags=re.S)


def functions(text: str) -> dict[str, tuple[str, bool]]:
    """Name: (body, whether it is a kernel) of every function defined."""
    found = {}
    for m in re.finditer(r"(\[\[kernel[^\n]*\]\]\s*)?[\w&*]+\s+(\w+)\(([^{};]*)\)\s*\{", text):
        depth, at = 1, m.end()
        while depth and at < len(text):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            at += 1
        found[m[2]] = (text[m.end() : at], m[1] is not None)
    return found


def lint(source: str) -> list[str]:
    """What breaks a rule, as ``line: message``."""
    found = []

    def add(at: int, message: str) -> None:
        found.append(f"{source.count(chr(10), 0, at) + 1}: {message}")

    for m in re.finditer(r"[^\t\n -~]", source):
        add(m.start(), "not ASCII")
    text = without_comments(source)
    for word, why in BANNED.items():
        for m in re.finditer(rf"\b{word}\b", text):
            add(m.start(), f"{word}: {why}")
    for pattern, why in PATTERNS:
        for m in re.finditer(pattern, text):
            add(m.start(), f"{m[0]}: {why}")
    # Declarations of pointers and references: a type, then * or &, then a name.
    declaration = re.compile(
        r"([(,;{}\n])\s*((?:const\s+)?[A-Za-z_]\w*(?:\s+\w+)*)\s*[*&]\s*(\w+)\s*[,)=;\[]"
    )
    for m in declaration.finditer(text):
        words = m[2].split()
        if words[0] in ("return", "define", "sizeof") or (len(words) == 1 and m[1] in "(,\n"):
            continue  # a product
        if not re.search(_SPACES, m[2]):
            add(m.start(), f"{m[2]} *{m[3]}: no address space")
    text = re.sub(  # macros: only what they expand to counts from here on
        r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", lambda m: "\n" * m[0].count("\n"), text, flags=re.M
    )
    bodies = functions(text)
    for name, (body, is_kernel) in bodies.items():
        if not is_kernel and re.search(r"\bthreadgroup\s+\w+\s+\w+\s*\[", body):
            add(text.index(body), f"{name}: threadgroup arrays belong in kernels")
    calls = {
        name: {other for other in bodies if re.search(rf"\b{other}\s*[(<]", body)}
        for name, (body, _) in bodies.items()
    }
    for name in calls:
        reached, todo = set(), list(calls[name])
        while todo:
            other = todo.pop()
            if other not in reached:
                reached.add(other)
                todo += calls[other]
        if name in reached:
            add(0, f"{name}: recursion")
    outside = text
    for body, _ in bodies.values():
        outside = outside.replace(body, "}")
    for m in re.finditer(r"^(?!constant\b|using\b|struct\b|template\b|#|\s|typedef\b|[^\n]*[(\\])"
                         r"[\w ]+\s\w+\s*(?:=[^\n]*)?;", outside, re.M):  # fmt: skip
        add(0, f"{m[0]}: variables outside functions have to be constant")
    return found
