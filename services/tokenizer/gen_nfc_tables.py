#!/usr/bin/env python3
"""Writes nfc_tables.inc from Python's unicodedata: python3 gen_nfc_tables.py > nfc_tables.inc

Hangul syllables are not listed: nfc.cc computes them.
"""
import sys
import unicodedata as ucd

CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF and not 0xAC00 <= c <= 0xD7A3]


def pairs():
    """(code point, first, second or 0, composes) of every canonical decomposition."""
    for c in CODE_POINTS:
        parts = ucd.decomposition(chr(c)).split()
        if not parts or parts[0].startswith("<"):
            continue
        first, second = int(parts[0], 16), int(parts[1], 16) if len(parts) > 1 else 0
        yield c, first, second, second != 0 and ucd.normalize("NFC", chr(c)) == chr(c)


def ranges(value_of):
    """(first, last, value) of the runs of code points with one nonzero value."""
    run = None
    for c in CODE_POINTS:
        value = value_of(c)
        if run and run[2] == value and run[1] == c - 1:
            run = (run[0], c, value)
            continue
        if run:
            yield run
        run = (c, c, value) if value else None
    if run:
        yield run


def emit(name, kind, rows):
    print(f"constexpr {kind} {name}[] = {{")
    line = ""
    for row in rows:
        item = "{" + ",".join(f"0x{v:X}" if i < 3 and v > 9 else str(int(v)) for i, v in enumerate(row)) + "},"
        if len(line) + len(item) > 118:
            print(line)
            line = ""
        line += item
    print(line)
    print("};")


def main():
    table = list(pairs())
    seconds = {second for _, _, second, composes in table if composes}
    jamo = set(range(0x1161, 0x1176)) | set(range(0x11A8, 0x11C3))

    def active(c):
        return ucd.combining(chr(c)) != 0 or c in seconds or c in jamo or ucd.normalize("NFC", chr(c)) != chr(c)

    print(f"// Unicode {ucd.unidata_version}, written by gen_nfc_tables.py.")
    emit("kDecompositions", "Decomposition", table)
    emit("kCombiningClasses", "CodePointRange", ranges(lambda c: ucd.combining(chr(c))))
    emit("kActive", "CodePointRange", ranges(lambda c: int(active(c))))


if __name__ == "__main__":
    sys.exit(main())
