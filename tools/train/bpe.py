"""splice-tiny's tokenizer, byte-level BPE, in plain Python: for counting and checking, not for speed.

It reads the model's tokenizer.json and must give the ids that `splice tokenize` gives (tests/tools/train). A cache of
pre-tokens makes it fast enough on ordinary text.
"""
import json
import re
import sys
import unicodedata


def unicode_class(prefix):
    """The inside of a [] that matches the characters whose general category begins with prefix: \\p{prefix}."""
    ranges, start = [], None
    for c in range(sys.maxunicode + 2):
        inside = c <= sys.maxunicode and unicodedata.category(chr(c)).startswith(prefix)
        if inside and start is None:
            start = c
        elif not inside and start is not None:
            ranges.append(f"\\U{start:08x}-\\U{c - 1:08x}")
            start = None
    return "".join(ranges)


LETTER, NUMBER = unicode_class("L"), unicode_class("N")
# Of tokenizer.json, with the classes that Python's re does not have written out.
PATTERN = (rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n{LETTER}{NUMBER}]?[{LETTER}]+|[{NUMBER}]"
           rf"| ?[^\s{LETTER}{NUMBER}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def byte_alphabet():
    """The usual GPT-2 table: byte -> printable character."""
    keep = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    table, n = {}, 0
    for b in range(256):
        if b in keep:
            table[b] = chr(b)
        else:
            table[b] = chr(256 + n)
            n += 1
    return table


B2U = byte_alphabet()
U2B = {u: b for b, u in B2U.items()}


class Tokenizer:
    def __init__(self, path):
        with open(path, encoding="utf-8") as file:
            spec = json.load(file)
        self.vocab = spec["model"]["vocab"]
        merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in spec["model"]["merges"]]
        self.ranks = {m: i for i, m in enumerate(merges)}
        self.special = {t["content"]: t["id"] for t in spec["added_tokens"]}
        self.pat = re.compile(PATTERN)
        self.split = re.compile("(" + "|".join(re.escape(s) for s in self.special) + ")")
        self.cache = {}
        self.id2tok = {i: t for t, i in self.vocab.items()}
        self.id2special = {i: t for t, i in self.special.items()}
        self.bos = self.special["<|begin_of_text|>"]
        self.eos = self.special["<|end_of_text|>"]
        self.im_end = self.special["<|im_end|>"]
        self.pad = self.special["<|pad|>"]
        self.size = max(list(self.vocab.values()) + list(self.special.values())) + 1

    def _word(self, word):
        parts = [B2U[b] for b in word.encode("utf-8")]
        ranks = self.ranks
        while len(parts) > 1:
            best, at = None, -1
            for i in range(len(parts) - 1):
                r = ranks.get((parts[i], parts[i + 1]))
                if r is not None and (best is None or r < best):
                    best, at = r, i
            if best is None:
                break
            pair = (parts[at], parts[at + 1])
            out, i = [], 0
            while i < len(parts):
                if i < len(parts) - 1 and (parts[i], parts[i + 1]) == pair:
                    out.append(parts[i] + parts[i + 1])
                    i += 2
                else:
                    out.append(parts[i])
                    i += 1
            parts = out
        return tuple(self.vocab[p] for p in parts)

    def encode_plain(self, text, out):
        cache = self.cache
        for w in self.pat.findall(text):
            ids = cache.get(w)
            if ids is None:
                ids = self._word(w)
                if len(cache) < 400000:
                    cache[w] = ids
            out += ids
        return out

    def encode(self, text):
        """Ids of text, special tokens recognised, no begin-of-text added."""
        out = []
        if "<|" not in text:
            return self.encode_plain(text, out)
        for piece in self.split.split(text):
            if not piece:
                continue
            sid = self.special.get(piece)
            if sid is not None:
                out.append(sid)
            else:
                self.encode_plain(piece, out)
        return out

    def count(self, text):
        return len(self.encode(text))

    def decode(self, ids, skip_special=False):
        out, buf = [], bytearray()
        for i in ids:
            i = int(i)
            if i in self.id2special:
                out.append(buf.decode("utf-8", errors="replace"))
                buf = bytearray()
                if not skip_special:
                    out.append(self.id2special[i])
            else:
                buf += bytes(U2B[c] for c in self.id2tok[i])
        out.append(buf.decode("utf-8", errors="replace"))
        return "".join(out)
