"""Passages to repeat, labels to learn from examples, and plain text."""
from collections import Counter

from lexicon import CATEGORIES
from samples import Plan, Sample, n_questions, n_segments


def copy(rng, w, length, mode):
    """Labelled passages; one is to be repeated in part."""
    lex = w.lex
    n = w.how_many(rng, length, 90, 24, train_low=2, share=0.8) if mode.train else mode.segments
    keys = []
    while len(keys) < n:
        k = lex.word(rng)
        if k not in keys:
            keys.append(k)
    room = (length - 150) // n
    if room < 40:
        return None
    heads, bodies, qs = [], [], []
    cap = 3 if not mode.train else rng.choice((1, 2, 3))
    spent = 0
    for k in keys:
        sents = w.filler.take(rng, room - 12)
        if not sents:
            return None
        heads.append(f"Passage {k}: ")
        bodies.append([" ".join(sents)])
        words = sents[0].split()
        if len(words) >= 6 and len(words) < 60:
            qs.append((f"Repeat the first sentence of passage {k}.", sents[0], {}))
            if len(sents) > 3:
                j = rng.randrange(1, len(sents))
                ws = sents[j].split()
                if 10 <= len(ws) < 60:
                    qs.append((f'Which words follow "{" ".join(ws[:5])}" in the passages?', " ".join(ws[5:13]), {}))
    rng.shuffle(qs)
    room = length - 150 - sum(w.count(h) + w.count(b[0]) + 3 for h, b in zip(heads, bodies))
    chosen = []
    for q in qs:
        c = w.count(q[0]) + w.count(q[1]) + 12
        if c < room + (110 if not chosen else 0) and len(chosen) < (cap if mode.train else 1):
            room -= c
            chosen.append(q)
    if not chosen:
        return None
    return Plan("copy", "Here are some passages.\n", heads, bodies, chosen, fill=False)


SHOT = ["I saw the {x} yesterday.", "Have you heard of the {x}?", "Nobody spoke about the {x}.",
        "The {x} was mentioned twice.", "She asked him for a {x}.", "It was only a {x}.",
        "We talked of the {x} all evening.", "He wrote about a {x}."]


def fewshot(rng, w, length, mode):
    """Classification with made-up labels, to be learned from examples in the context."""
    lex = w.lex
    n_class = rng.randint(2, 8) if mode.train else 6
    cats = rng.sample(sorted(CATEGORIES), n_class)
    labels = []
    style = rng.randrange(3) if mode.train else 0
    while len(labels) < n_class:
        x = (lex.name(rng), "Class " + lex.variable(rng, 3), lex.word(rng))[style]
        if x not in labels:
            labels.append(x)
    label = dict(zip(cats, labels))
    room = length - 220
    items = []
    use_fill = rng.random() < 0.5 if mode.train else True
    while True:
        cat = rng.choice(cats)
        x = rng.choice(CATEGORIES[cat])
        text = rng.choice(SHOT).format(x=x)
        if use_fill and length > 700:
            text = " ".join(w.filler.take(rng, min(300, length // 40)) + [text])
        ex = f"Text: {text}\nLabel: {label[cat]}"
        c = w.count(ex) + 1
        if c > room:
            break
        room -= c
        items.append((cat, x, ex))
        if mode.train and len(items) > 6 * n_class and rng.random() < 0.02:
            break
    seen = Counter(c for c, _, _ in items)
    cats = [c for c in cats if seen[c] >= 1]
    if len(cats) < 2:
        return None
    qs = []
    for _ in range(n_questions(rng, length, mode, 6)):
        cat = rng.choice(cats)
        x = rng.choice(CATEGORIES[cat])
        qs.append((f"Give the label of this text.\nText: {rng.choice(SHOT).format(x=x)}", label[cat],
                   {"seen": any(x == y for _, y, _ in items)}))
    room = length - 220
    n = n_segments(rng, length, mode)
    step = -(-len(items) // n)
    segs = [["\n".join(e for _, _, e in items[i:i + step])] for i in range(0, len(items), step)]
    return Plan("fewshot", "Learn the labels from these examples.\n", [""] * len(segs), segs, qs, fill=False, sep="\n")


def lm(rng, w, length):
    s = Sample("lm")
    bos = "<|begin_of_text|>" if rng.random() < 0.7 else ("<|seg|>" if rng.random() < 0.5 else "")
    room = length - 2
    if rng.random() < 0.2 + 0.4 * w.ease and length >= 100:
        # repeated passage, further text in between
        part = w.filler.take(rng, max(24, int(room * rng.uniform(0.1, 0.35))))
        rest = w.filler.take(rng, room - 2 * sum(w.count(" " + x) for x in part) - 2)
        text = " ".join(part) + "\n" + " ".join(rest) + "\n" + " ".join(part)
    else:
        text = " ".join(w.filler.take(rng, room))
        if w.paragraphs and rng.random() < w.paragraphs:
            text = w.filler.with_breaks(rng, room)
    s.add("lm", bos + text.lstrip())
    return s
