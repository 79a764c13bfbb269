#!/usr/bin/env python3
"""Writes nfc.jsonl: random runs of the characters that normalization acts on, and what Python makes of them."""
import json
import pathlib
import random
import unicodedata as ucd

rng = random.Random(11)
CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
MARKS = [c for c in CODE_POINTS if ucd.combining(chr(c))]
PAIRED = [c for c in CODE_POINTS if ucd.decomposition(chr(c)) and not ucd.decomposition(chr(c)).startswith("<")]
JAMO = list(range(0x1100, 0x1113)) + list(range(0x1161, 0x1176)) + list(range(0x11A7, 0x11C3)) + [0xAC00, 0xAC01, 0xD7A3]
PLAIN = [ord(c) for c in "aeiouAEIOUbcdn <=>"] + [0x4E00, 0x1F642, 0x915, 0x30AB, 0x3099]

with open(pathlib.Path(__file__).parent / "nfc.jsonl", "w") as out:
    for i in range(400):
        pools = [MARKS, PAIRED, PLAIN, PLAIN] if i % 4 else [JAMO, JAMO, JAMO, PLAIN]
        text = "".join(chr(rng.choice(rng.choice(pools))) for _ in range(rng.randrange(1, 9)))
        if i % 3 == 0:
            text = ucd.normalize("NFD", text)
        out.write(json.dumps({"text": text, "nfc": ucd.normalize("NFC", text)}) + "\n")
