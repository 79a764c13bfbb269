"""Variable tracking: chains of assignments across the text."""
from samples import FULL, Plan, n_questions, n_segments, spread


VT_PREFIX = ["Memorize and track the chain(s) of variable assignment hidden in the following text.\n",
             "Track the variables in the text below.\n", "The text below assigns values to variables.\n"]


def vt(rng, w, length, mode, variant=None, hops=None, capital=False):
    """Chains of assignments. variant: value (of one variable), list (all variables of a value),
    update (variables are assigned again later; a copy keeps the value it had when it was made)."""
    lex = w.lex
    if mode.train:
        variant = rng.choices(("value", "list", "update"), (0.45, 0.1, 0.45))[0]
        letters = rng.choice((2, 2, 3) if rng.random() < w.ease else (2, 3, 3, 3, 4))
        digits = rng.choice((2, 3, 4, 5, 5))
        n_vars = w.how_many(rng, length, 18, 60, train_low=3)
        depth = rng.choice((1, 2, 2, 3, 4))
    else:
        letters, digits, depth = 3, 5, 4
        n_vars = 20 if variant != "update" else 16
    names = []
    plain = rng.random() < w.words if mode.train else not capital  # names: words of one token, or capital letters
    if plain:
        names = lex.codes(rng, n_vars, spoken=variant == "list")
        n_vars = len(names)
    while len(names) < n_vars:
        v = lex.variable(rng, letters)
        if v not in names:
            names.append(v)
    values, used = {}, set(names)
    verbal = mode.train and rng.random() < 0.25

    def fresh():
        while True:
            x = lex.code(rng) if verbal else lex.number(rng, digits)
            if x not in used or len(used) > (0.5 * len(lex.easy) if verbal else 0.5 * 10 ** digits):
                used.add(x)
                return x

    facts, hop, stale = [], {}, {}
    if variant in ("value", "list"):
        chains = [names[i:i + depth + 1] for i in range(0, n_vars, depth + 1)]
        queues = []
        for c in chains:
            base = fresh()
            q = []
            for j, v in enumerate(c):
                values[v], hop[v] = base, j
                q.append((f"VAR {v} = {base}." if j == 0 else f"VAR {v} = VAR {c[j - 1]}.", v))
            queues.append(q)
        while queues:
            q = rng.choice(queues)
            facts.append(q.pop(0))
            queues = [x for x in queues if x]
    else:
        steps = n_vars + rng.randint(n_vars // 4, n_vars // 2)
        live, todo = [], list(names)
        stale = {}
        source = {}
        for _ in range(steps):
            again = live and (not todo or rng.random() < 0.3)
            v = rng.choice(live) if again else todo.pop()
            others = [x for x in live if x != v and hop[x] < depth]
            if others and rng.random() < 0.55:
                src = rng.choice(others)
                values[v], hop[v], source[v], stale[v] = values[src], hop[src] + 1, src, False
                text = f"VAR {v} = VAR {src}."
            else:
                values[v], hop[v], source[v], stale[v] = fresh(), 0, None, False
                text = f"VAR {v} = {values[v]}."
            for x, s in source.items():
                if s == v and x != v:
                    stale[x] = True
            if not again:
                live.append(v)
            facts.append((text, v))
        names = live
    order = [v for _, v in facts]
    qas = []
    if variant == "list":
        for c in rng.sample(chains, min(len(chains), n_questions(rng, length, mode, len(chains)))):
            same = [v for v in dict.fromkeys(order) if values[v] == values[c[0]]]
            q = f"Find all variables that are assigned the value {values[c[0]]} in the text above."
            qas.append((q, " ".join(same), {"hops": len(c) - 1}))
    else:
        pool = list(names)
        rng.shuffle(pool)
        if mode.train:
            deep = [v for v in pool if hop[v] > 0]
            flat = [v for v in pool if hop[v] == 0]
            pool = deep + flat[:max(1, len(deep) // 3)]
            rng.shuffle(pool)
        elif variant == "value":
            pool = [v for v in pool if hop[v] == hops]
        else:
            pool = [v for v in pool if hop[v] == 1 and stale[v]] or [v for v in pool if hop[v] >= 1] or pool
        for v in pool[:n_questions(rng, length, mode, len(pool))]:
            q = f"What is the value of VAR {v}?"
            a = values[v]
            m = {"hops": hop[v]}
            if mode.train and variant == "value" and rng.random() < w.echo:
                m["echo"] = 1
                if hop[v] > 0 and rng.random() < 0.5:
                    c = next(c for c in chains if v in c)
                    path = c[:c.index(v) + 1][::-1]
                    q += " Show the chain."
                    a = " = ".join("VAR " + x for x in path) + " = " + a
                else:
                    q += FULL
                    a = f"VAR {v} = {a}"
            elif mode.train and rng.random() < w.echo:
                m["echo"] = 1
                q += FULL
                a = f"VAR {v} = {a}"
            qas.append((q, a, m))
    n = n_segments(rng, length, mode)
    texts = [t for t, _ in facts]
    if mode.train:
        segs = spread(rng, texts, n)
    else:
        segs = spread_apart(rng, facts, n, asked_chain(facts, qas[0], variant))
    prefix = rng.choice(VT_PREFIX) if mode.train else VT_PREFIX[0]
    return Plan("vt", prefix, [""] * n, segs, qas, variant=variant)


def asked_chain(facts, qa, variant):
    """Indices of the statements that the answer depends on, first to last."""
    if variant == "list":
        names = set(qa[1].split())
        return [i for i, (_, v) in enumerate(facts) if v in names]
    name = qa[0].split("VAR ")[1].rstrip("?")
    out, limit = [], len(facts)
    while name:
        i = max(i for i, (_, v) in enumerate(facts[:limit]) if v == name)
        out.append(i)
        limit = i
        right = facts[i][0].split(" = ")[1].rstrip(".")
        name = right[4:] if right.startswith("VAR ") else None
    return out[::-1]


def spread_apart(rng, facts, n, chain):
    """Statements into n segments in order, the chain's statements in different segments while they fit."""
    best, best_score = None, -1
    for _ in range(200):
        where = sorted(rng.randrange(n) for _ in facts)
        score = len({where[i] for i in chain})
        if score > best_score:
            best, best_score = where, score
        if score == min(n, len(chain)):
            break
    out = [[] for _ in range(n)]
    for (t, _), k in zip(facts, best):
        out[k].append(t)
    return out
