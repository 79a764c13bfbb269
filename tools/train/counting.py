"""Counting: the most frequent words of a list, and of a text in made-up words."""
from collections import Counter

from samples import Plan, n_segments


def cwe(rng, w, length, mode):
    lex = w.lex
    top = 3 if not mode.train else rng.choice((1, 2, 3, 3))
    room = length - 110 - 4 * n_max_segments(mode)
    share = 0.15 if not mode.train else rng.choice((0.12, 0.15, 0.2, 0.3))
    f_c = max(4, int(room * share / (top * 1.6)))  # how often a common word comes
    f_r = max(1, f_c // 6)                         # how often any other word comes
    known = lex.words if mode.train else lex.spoken
    pool = rng.sample(known, min(len(known), top + 8 + room // f_r))
    common, rare = pool[:top], pool[top:]
    items = [x for x in common for _ in range(f_c)]
    room -= sum(w.count(" " + x) for x in items)
    for x in rare:
        c = w.count(" " + x) * f_r
        if c > room:
            break
        room -= c
        items += [x] * f_r
    rng.shuffle(items)
    first = sorted(common, key=items.index)
    n = n_segments(rng, length, mode)
    step = -(-len(items) // n)
    segs = [[" ".join(items[i:i + step])] for i in range(0, len(items), step)]
    q = (f"What are the {top} most common words in the above list?" if top > 1 else
         "What is the most common word in the above list?")
    prefix = ("Below is a list of words. In these words, some appear more often than others. Memorize the ones that "
              "appear most often.\n")
    return Plan("cwe", prefix, [""] * len(segs), segs, [(q, " ".join(first), {})], fill=False)


def n_max_segments(mode):
    return mode.segments if not mode.train else 8


def fwe(rng, w, length, mode):
    lex = w.lex
    alpha = 2.0 if not mode.train else rng.choice((1.6, 2.0, 2.0, 2.4))
    n_words = 40
    words = []
    while len(words) < n_words:
        x = lex.pseudo(rng)
        if x not in words:
            words.append(x)
    room = length - 110 - 4 * n_max_segments(mode)
    cost = [w.count(" " + x + " ....") for x in words]
    share = [1.0 / (k + 1) ** alpha for k in range(n_words)]
    total = sum(s * c for s, c in zip(share, cost))
    items = []
    for x, s in zip(words, share):
        items += [x] * int(room * s / total)
    counts = Counter(items)
    top = [x for x, _ in counts.most_common(4)]
    if len(top) < 4 or any(counts[a] <= counts[b] for a, b in zip(top, top[1:])):
        k = 1
        if len(top) < 2 or counts[top[0]] <= counts[top[1]]:
            return None
    else:
        k = 3
    if mode.train and k == 3:
        k = rng.choice((1, 3, 3))
    elif not mode.train and k != 3:
        return None
    rng.shuffle(items)
    n = n_segments(rng, length, mode)
    step = -(-len(items) // n)
    segs = [[" .... ".join(items[i:i + step]) + " ...."] for i in range(0, len(items), step)]
    q = ("What are the three most frequently appeared words in the above coded text?" if k == 3 else
         "What is the most frequently appeared word in the above coded text?")
    prefix = "Read the following coded text and track the frequency of each coded word.\n"
    return Plan("fwe", prefix, [""] * len(segs), segs, [(q, " ".join(top[:k]), {})], fill=False)
