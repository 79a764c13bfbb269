"""The metrics of the programs: as docs/metrics.md lists them, and as the sources register them."""
import collections
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "metrics.md"

# type: counter, gauge or histogram; labels: name -> set of known values; programs: set of router, prefill, decode, store;
# local_prefill: the decode worker has it only if it prefills itself
Metric = collections.namedtuple("Metric", "type labels programs local_prefill", defaults=[False])

# Folders of the sources that belong to one program alone.
PROGRAM_OF_FOLDER = {"router": "router", "prefill": "prefill", "decode": "decode", "kvstore": "store"}


def read_table(text=None):
    """Rows of the table by name. ValueError: a row that cannot be read, or a name twice."""
    metrics = {}
    for line in (TABLE.read_text() if text is None else text).splitlines():
        if not line.startswith("| `splice_"):
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 6 or not cells[3] or not cells[5]:
            raise ValueError(f"docs/metrics.md: not a row of six cells, unit and meaning included: {line}")
        name = cells[0].strip("`")
        if name in metrics:
            raise ValueError(f"docs/metrics.md: {name} is listed twice")
        labels = {}
        for part in re.finditer(r"`(\w+)`(?::([^`]*))?", cells[2]):
            values = {value.strip() for value in (part.group(2) or "").split(",")}
            labels[part.group(1)] = values - {""}
        programs = {program.strip() for program in cells[4].split(",")}
        metrics[name] = Metric(cells[1], labels, {program.rstrip("*") for program in programs}, "decode*" in programs)
    return metrics


def read_vllm_table():
    """Names of vLLM and the own name behind each."""
    return dict(re.findall(r"^\| `(vllm:\w+)` \| `(splice_\w+)`", TABLE.read_text(), re.MULTILINE))


def _balanced(text, start):
    """The text between the parenthesis at `start` and its partner; string literals may hold parentheses."""
    depth, position = 0, start
    while position < len(text):
        if text[position] == '"':
            position = re.compile(r'"(?:[^"\\]|\\.)*"').match(text, position).end()
            continue
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        position += 1
        if depth == 0:
            return text[start + 1:position - 1]
    raise ValueError("unbalanced parentheses")


def _label_pairs(arguments):
    """{"name", "value"} or {"name", expression} pairs of a call's arguments; a value that is not a literal is None."""
    pairs = re.finditer(r'\{\s*"(\w+)"\s*,\s*(?:"([^"]*)"|([^"{}]+))\s*\}', arguments)
    return [(pair.group(1), pair.group(2)) for pair in pairs]


def scan_sources(root=ROOT):
    """What services/ and tools/ register: by name, with literal label values only, and the folders' programs."""
    names = dict(re.findall(r'(k\w+)\[\]\s*=\s*"(splice_\w+)"', (root / "services/base/metrics.h").read_text()))
    found = {}
    call = re.compile(r"(?:\.|->)\s*(Counter|Gauge|Histogram)\s*(\()")
    for path in sorted(root.glob("services/**/*")) + sorted(root.glob("tools/**/*")):
        if path.suffix not in (".cc", ".h") or path.parent / path.stem == root / "services/base/metrics":
            continue
        text = path.read_text()
        # Labels of a helper are passed on by the helper's own call, with a literal at its caller's.
        for match in call.finditer(text):
            arguments = _balanced(text, match.start(2))
            first = re.match(r'\s*(?:"(\w+)"|(?:\w+::)*(k\w+))', arguments)
            if first is None:
                raise ValueError(f"{path}: a metric whose name is neither a literal nor a constant: {arguments[:80]}")
            name = first.group(1) or names[first.group(2)]
            where = arguments
            if re.search(r"\blabels\b", arguments):  # a variable of the same function
                where += "".join(re.findall(r"MetricLabels labels\s*=\s*(\{.*?\});", text, re.DOTALL))
            entry = found.setdefault(name, Metric(match.group(1).lower(), {}, set()))
            if entry.type != match.group(1).lower():
                raise ValueError(f"{path}: {name} is a {entry.type} elsewhere")
            for label, value in _label_pairs(where):
                entry.labels.setdefault(label, set())
                if value is not None:
                    entry.labels[label].add(value)
            folder = path.relative_to(root).parts[1]
            if folder in PROGRAM_OF_FOLDER:
                entry.programs.add(PROGRAM_OF_FOLDER[folder])
    return found


def names_in(expression, table):
    """Metrics that a PromQL expression uses, without the suffixes that histograms add. KeyError names one not in the table."""
    used = set()
    for series in set(re.findall(r"\bsplice_\w+", expression)):
        name = series
        if name not in table:
            name = re.sub(r"_(bucket|sum|count)$", "", series)
            if name not in table or table[name].type != "histogram":
                raise KeyError(f"{series} is not in docs/metrics.md")
        used.add(name)
    return used
