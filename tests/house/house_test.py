#!/usr/bin/env python3
"""Checks of the tree as a whole: who includes whom, how long files and functions are, that names of files exist, that
comments in headers can be read, that nothing built is in it.

  house_test.py ROOT             checks the tree; every line that it prints is a mistake
  house_test.py ROOT --update    writes the lists of what is too long today (only ever to shorten them)
  house_test.py --self-test      checks that the checks find what they should

layers.txt says who may include whom. ratchet.json lists files and functions that are longer than the limit, with their
length: none may grow, and one that is short enough now must leave the list.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
SOURCES = {".h", ".cc", ".cu"}
PRODUCT = ("kernels/", "services/", "tools/")
# None of these includes another.
PROGRAMS = ("services/prefill/", "services/decode/", "services/kvstore/", "services/router/")
FILE_LINES = 400
FUNCTION_LINES = 70
# What is built, or packed by others.
BUILT = {".whl", ".so", ".a", ".o", ".zip", ".deb", ".tar", ".tgz", ".gguf"}
# Written as files of other projects, of a user, or of the system.
FOREIGN_DOCS = {"SKILL.md"}


def tracked(root):
    names = subprocess.run(["git", "-C", root, "ls-files", "-co", "--exclude-standard"], check=True, text=True,
                           capture_output=True).stdout.split("\n")
    return sorted(name for name in names if name and (root / name).is_file())


def read_layers(text):
    layers = {}
    for number, line in enumerate(line for line in text.splitlines() if line and not line.startswith("#")):
        for folder in line.split():
            layers[folder] = number
    return layers


def folder_of(name, layers):
    folder = str(pathlib.PurePosixPath(name).parent)
    while folder not in layers and "/" in folder:
        folder = folder.rsplit("/", 1)[0]
    return folder if folder in layers else None


def check_includes(files, layers):
    for name, text in files.items():
        own = folder_of(name, layers)
        if own is None:
            yield f"{name}: tests/house/layers.txt does not list its folder"
            continue
        for number, line in enumerate(text.splitlines(), 1):
            match = re.match(r'\s*#\s*include "((?:kernels|services|tools|tests)/[^"]+)"', line)
            if match is None:
                continue
            other = folder_of(match[1], layers)
            if name.startswith(PROGRAMS) and match[1].startswith(PROGRAMS) and name.split("/")[1] != match[1].split("/")[1]:
                yield f"{name}:{number}: includes {match[1]} of another program: move what both need to a folder below"
            elif other is None or layers[other] > layers[own]:
                yield (f"{name}:{number}: {own} includes {match[1]}, which is above it (tests/house/layers.txt): "
                       "move one of them, or turn the dependency around")


def without_comments_and_text(text):
    """The same lines, with what stands in comments, strings and characters blanked out."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|R"([^()\s]*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', re.S)
    return pattern.sub(lambda match: "".join(c if c == "\n" else " " for c in match[0]), text)


def functions(text):
    """(name, first line, lines) of each function with a body; a lambda belongs to the function that it stands in."""
    clean = without_comments_and_text(text)
    clean = re.sub(r"^[ \t]*#(?:\\\n|[^\n])*", lambda match: "\n" * match[0].count("\n"), clean, flags=re.M)
    depth_of_function = None
    stack = []  # of each open brace: whether it is a function's
    begin = 0  # of the statement
    i = 0
    while i < len(clean):
        c = clean[i]
        if c == "{":
            if depth_of_function is None:
                head = clean[begin:i]
                name = function_name(head)
                if name is not None:
                    depth_of_function = len(stack)
                    first = begin + len(head) - len(head.lstrip())
                    start = (name, clean.count("\n", 0, first) + 1)
            stack.append(c)
            if depth_of_function is None:
                begin = i + 1
        elif c == "}":
            if stack:
                stack.pop()
            if depth_of_function is not None and len(stack) == depth_of_function:
                depth_of_function = None
                # Members of a constructor may be made with braces in front of its body.
                if not re.match(r"\s*[,{]", clean[i + 1:i + 200]):
                    last = clean.count("\n", 0, i) + 1
                    yield start[0], start[1], last - start[1] + 1
                    begin = i + 1
            elif depth_of_function is None:
                begin = i + 1
        elif c == ";" and depth_of_function is None:
            begin = i + 1
        i += 1


def opens_scope(head):
    return re.search(r"\b(namespace|class|struct|enum|union|extern)\b", head) is not None


def function_name(head):
    """Of what stands in front of a brace; None: it is no function."""
    head = head.strip()
    if not head or opens_scope(re.sub(r"\([^()]*\)", "", re.sub(r"<[^<>]*>", "", head))) and "(" not in head:
        return None
    if re.search(r"=\s*$", head) or re.match(r"(return|if|for|while|switch|do|else|case)\b", head):
        return None
    match = re.search(r"([~\w:]+|operator\s*\S+?)\s*\(", re.sub(r"__\w+__\s*\((?:[^()]|\([^()]*\))*\)|alignas\s*\([^()]*\)", "", head))
    if match is None or re.match(r"(namespace|class|struct|enum|union)\b", head):
        return None
    return match[1]


def too_long(files):
    """Lines of each file and function that has more than the limit; a function's key is its file and its name."""
    longest = {}
    for name, text in files.items():
        lines = text.count("\n")
        if lines > FILE_LINES:
            longest[name] = lines
        for function, _, count in functions(text):
            if count > FUNCTION_LINES:
                key = f"{name} {function}"
                longest[key] = max(longest.get(key, 0), count)
    return longest


def check_lengths(files, ratchet):
    longest = too_long(files)
    for key, lines in sorted(longest.items()):
        limit = FUNCTION_LINES if " " in key else FILE_LINES
        if key not in ratchet:
            yield f"{key}: {lines} lines, at most {limit}"
        elif lines > ratchet[key]:
            yield f"{key}: {lines} lines, it had {ratchet[key]} and may only become shorter"
        elif lines < ratchet[key]:
            yield f"{key}: {lines} lines, tests/house/ratchet.json says {ratchet[key]}: run house_test.py . --update"
    for key in sorted(set(ratchet) - set(longest)):
        yield f"{key}: short enough, or gone: run house_test.py . --update"


def check_references(files, names):
    known = set(names) | {str(parent) for name in names for parent in pathlib.PurePosixPath(name).parents}
    basenames = {name.rsplit("/", 1)[-1] for name in names}
    for name, text in files.items():
        code = pathlib.PurePosixPath(name).suffix in SOURCES
        for number, line in enumerate(text.splitlines(), 1):
            if code:  # names in strings are not references
                line = line.partition("//")[2]
            for target in re.findall(r"(?<![\w./-])([A-Za-z][\w./-]*\.md)\b", line):
                if "://" in line and re.search(r"https?://\S*" + re.escape(target), line):
                    continue
                if target in known or target in FOREIGN_DOCS:
                    continue
                beside = pathlib.PurePosixPath(name).parent
                if str(beside / target) in known or (("/" not in target) and target in basenames):
                    continue
                yield f"{name}:{number}: there is no {target}"
            if "docs/results/" not in name:  # they tell of the tree as it was
                for target in re.findall(r"(?<![\w./-])((?:kernels|services|tools|tests|proto|deploy)/[\w./-]*\.(?:h|cc|cu|py|proto))\b",
                                         line):
                    if target not in known:
                        yield f"{name}:{number}: there is no {target}"
            if not name.endswith(".md"):
                continue
            for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", line):
                if "://" in target or target.startswith("mailto:"):
                    continue
                path = (pathlib.PurePosixPath(name).parent / target)
                parts = []
                for part in path.parts:
                    parts = parts[:-1] if part == ".." else parts + [part]
                if "/".join(parts).rstrip("/") not in known:
                    yield f"{name}:{number}: the link to {target} leads nowhere"


def comments(text):
    """(first line, text) of each comment: a block of lines that are nothing else, or what stands behind code."""
    code = re.compile(r'//[^\n]*|/\*.*?\*/|R"([^()\s]*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', re.S)
    block, begin, last = [], 0, None
    for match in code.finditer(text):
        if not match[0].startswith("//"):
            continue
        number = text.count("\n", 0, match.start()) + 1
        alone = text[text.rfind("\n", 0, match.start()) + 1:match.start()].strip() == ""
        words = match[0].lstrip("/").strip()
        if block and (not alone or last != number - 1 or not words):
            yield begin, " ".join(block)
            block = []
        if not words:
            continue
        if not alone:
            yield number, words
            continue
        if not block:
            begin = number
        block.append(words)
        last = number
    if block:
        yield begin, " ".join(block)


def check_words(files):
    """Comments of headers begin with the thing or the verb: neither they nor a sentence in them with Of, What, Whose."""
    for name, text in files.items():
        if not name.endswith(".h"):
            continue
        for number, comment in comments(text):
            match = re.match(r"of\b", comment) or re.search(r"(?:^|[.!?]\s+)((?:Of|What|Whose|Whoever)\b)", comment)
            if match is not None:
                start = match.start(match.lastindex or 0)
                yield f"{name}:{number}: \"{comment[start:start + 40]}\": begin with the thing or the verb (CONTRIBUTING.md)"


def check_sources(names):
    for name in names:
        if not BUILT.isdisjoint(pathlib.PurePosixPath(name).suffixes):
            yield f"{name}: built or packed; the tree holds sources"


def self_test():
    layers = read_layers("# comment\na\nb b2\nc\n")
    assert layers == {"a": 0, "b": 1, "b2": 1, "c": 2}
    bad = list(check_includes({"services/x/f.h": '#include "services/y/g.h"\n'},
                              {"services/x": 0, "services/y": 1}))
    assert len(bad) == 1 and "services/y/g.h" in bad[0], bad
    assert not list(check_includes({"services/y/f.h": '#include "services/x/g.h"\n'},
                                   {"services/x": 0, "services/y": 1}))
    programs = {"services/prefill": 0, "services/decode": 1}
    assert "another program" in list(check_includes({"services/decode/f.h": '#include "services/prefill/g.h"\n'}, programs))[0]
    assert len(list(check_includes({"services/z/f.h": ""}, {"services/x": 0}))) == 1
    code = '''#define F(x) \\
  if (x) {   \\
  }
namespace a {
struct S {
  int f() const { return 1; }
  S() : x{1}, y(2) {
    g("}");
  }
};
template <typename T>
absl::Status A::B(const T& t,
                  int u) {
  const auto inner = [&](int v) {
    return v;
  };
  // }
  if (x) {
    y();
  }
}
constexpr int kTable[] = {1, 2};
}  // namespace a
'''
    found = {name: lines for name, _, lines in functions(code)}
    assert found == {"f": 1, "S": 3, "A::B": 11}, found
    body = "void F() {\n" + "  g();\n" * 80 + "}\n"
    assert len(list(check_lengths({"services/x.cc": body}, {}))) == 1
    assert not list(check_lengths({"services/x.cc": body}, {"services/x.cc F": 82}))
    assert "may only" in list(check_lengths({"services/x.cc": body}, {"services/x.cc F": 81}))[0]
    assert "--update" in list(check_lengths({"services/x.cc": body}, {"services/x.cc F": 90}))[0]
    assert "--update" in list(check_lengths({"services/x.cc": "\n"}, {"services/x.cc F": 90}))[0]
    names = ["docs/a.md", "services/x.cc"]
    assert not list(check_references({"services/x.cc": "// see docs/a.md, a.md\n"}, names))
    assert len(list(check_references({"services/x.cc": "// see spec.md\n"}, names))) == 1
    assert len(list(check_references({"docs/a.md": "`services/y.cc`, `services/x.cc`"}, names))) == 1
    assert not list(check_references({"docs/results/a.md": "`services/y.cc`"}, names))
    assert len(list(check_references({"docs/a.md": "[x](b/c.svg) [y](../services/x.cc)\n"}, names))) == 1
    for words in ("Of rows, the last.", "Rows. What is left.", "of the step", "A row. Whose it is."):
        assert len(list(check_words({"services/x.h": f"// {words}\nint a;  // {words}\n"}))) == 2, words
    assert not list(check_words({"services/x.h": "// Rows of the step, and what is left.\n", "services/x.cc": "// Of rows.\n"}))
    assert len(list(check_sources(["numpy-2.4-cp311.whl", "a/b.tar.xz", "lib/c.so.1", "docs/a.md", "tests/a.jsonl.xz"]))) == 3
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        subprocess.run(["git", "-C", folder, "init", "-q"], check=True)
        (root / "f.h").write_text("\n")
        assert tracked(root) == ["f.h"]
    print("the checks find what they should")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=pathlib.Path)
    parser.add_argument("--update", action="store_true", help="write ratchet.json anew; refused where something grew")
    parser.add_argument("--self-test", action="store_true")
    flags = parser.parse_args()
    if flags.self_test:
        return self_test()
    names = tracked(flags.root)
    text = {name: (flags.root / name).read_text(errors="replace")
            for name in names if pathlib.PurePosixPath(name).suffix in SOURCES | {".md", ".txt", ".py", ".proto"}}
    code = {name: t for name, t in text.items()
            if name.startswith(PRODUCT) and pathlib.PurePosixPath(name).suffix in SOURCES}
    product = {name: t for name, t in code.items() if "_bench." not in name and "bench_" not in name}
    ratchet_file = HERE / "ratchet.json"
    ratchet = json.loads(ratchet_file.read_text()) if ratchet_file.exists() else {}
    mistakes = list(check_includes(product, read_layers((HERE / "layers.txt").read_text())))
    lengths = list(check_lengths(product, ratchet))
    if flags.update:
        grown = [line for line in lengths if "--update" not in line] if ratchet else []
        if grown:
            sys.exit("\n".join(grown))
        ratchet_file.write_text(json.dumps(too_long(product), indent=1, sort_keys=True) + "\n")
        lengths = []
    mistakes += lengths
    mistakes += list(check_words(code))
    mistakes += list(check_sources(names))
    mistakes += list(check_references({n: t for n, t in text.items() if not n.startswith("tests/house/")}, names))
    for line in mistakes:
        print(line)
    if mistakes:
        sys.exit(f"{len(mistakes)} mistakes")
    print(f"{len(product)} files of the product, {len(ratchet)} of their files and functions still too long")


if __name__ == "__main__":
    main()
