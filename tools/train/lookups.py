"""Look-ups: needles in a long text, dense tables of keys and values, keys that point to keys."""
from samples import FULL, Plan, n_questions, n_segments, spread


NIAH_PREFIX = ["Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz "
               "you about the {kind} afterwards.\n",
               "Read the text below. It hides some special magic {kind}.\n",
               "Here is a long text with special magic {kind} in it.\n"]


def join_and(items):
    if len(items) == 1:
        return items[0]
    if len(items) == 2:
        return items[0] + " and " + items[1]
    return ", ".join(items[:-1]) + ", and " + items[-1]


def niah(rng, w, length, mode, variant=None):
    lex = w.lex
    if mode.train:
        kind = rng.choice(("numbers", "numbers", "numbers", "words"))
        digits = rng.choice((4, 5, 6, 7, 7, 7))
        n_keys = w.how_many(rng, length, 34, 48)
        variant = rng.choice(("single", "single", "multiquery", "multivalue"))
    else:
        kind, digits = "numbers", 7
        n_keys = {"single": 1, "multikey": 8, "multiquery": 8, "multivalue": 4}[variant]
    keys = []
    ease = w.ease if mode.train else 0.0
    while len(keys) < n_keys:
        k = lex.key(rng, ease)
        if k not in keys:
            keys.append(k)
    facts, values = [], {k: [] for k in keys}
    multi = keys[0] if variant == "multivalue" else None
    for k in keys:
        for _ in range(rng.randint(2, 4) if k == multi and mode.train else 4 if k == multi else 1):
            v = lex.number(rng, digits) if kind == "numbers" else lex.word(rng)
            facts.append((k, v))
    rng.shuffle(facts)
    texts = []
    t = rng.randrange(3) if mode.train else 0
    for k, v in facts:
        values[k].append(v)
        texts.append((f"One of the special magic {kind} for {k} is: {v}.",
                      f"The special magic {kind[:-1]} for {k} is {v}.",
                      f"Remember that the magic {kind[:-1]} of {k} is {v}.")[t])
    qas, asked = [], []
    n_q = n_questions(rng, length, mode, n_keys)
    order = list(keys)
    rng.shuffle(order)
    if multi:
        order.remove(multi)
        order.insert(0, multi)
    while len(qas) < n_q and order:
        if variant == "multiquery" and len(order) >= 2:
            m = min(len(order), rng.randint(2, 4) if mode.train else 4)
            ks = [order.pop() for _ in range(m)]
            qas.append((f"What are all the special magic {kind} for {join_and(ks)} mentioned in the provided text?",
                        ", ".join(values[k][0] for k in ks), {}))
        else:
            k = order.pop(0)
            if len(values[k]) > 1:
                q = f"What are all the special magic {kind} for {k} mentioned in the provided text?"
            else:
                q = f"What is the special magic {kind[:-1]} for {k} mentioned in the provided text?"
            a = ", ".join(values[k])
            if mode.train and len(values[k]) == 1:
                if rng.random() < 0.3:
                    q = rng.choice((f"What is the magic {kind[:-1]} of {k}?",
                                    f"Which special magic {kind[:-1]} belongs to {k}?"))
                if rng.random() < w.echo:
                    q += FULL
                    a = f"The special magic {kind[:-1]} for {k} is {a}."
            qas.append((q, a, {"echo": 1} if q.endswith(FULL) else {}))
    if mode.train:
        rng.shuffle(qas)
    prefix = (rng.choice(NIAH_PREFIX) if mode.train else NIAH_PREFIX[0]).format(kind=kind)
    n = n_segments(rng, length, mode)
    return Plan("niah", prefix, [""] * n, spread(rng, texts, n), qas, variant=variant)


def table(rng, w, length, mode):
    """Dense look-ups, several in one answer: what makes key matching form early in training."""
    lex = w.lex
    share = rng.choice((0.3, 0.5, 0.7))
    simple = rng.random() < w.ease  # one-token keys directly followed by one-token values
    n = w.how_many(rng, length, 3 if simple else 9, 150, train_low=3, share=share)
    style = rng.choice(("word", "word", "letters", "name")) if not simple or rng.random() < 0.3 else "word"
    letters = rng.choice((2, 2, 3))
    keys, facts = [], []
    while len(keys) < n:
        k = (lex.word(rng, 1.0 if simple else 0.8) if style == "word" else
             lex.variable(rng, letters) if style == "letters" else lex.name(rng))
        if k not in keys:
            keys.append(k)
    digits = rng.choice((1, 2, 2, 3, 4, 5))
    kind = "word" if simple else rng.choice(("number", "number", "word"))
    val = {k: lex.number(rng, digits) if kind == "number" else lex.word(rng, 1.0 if simple else 0.7) for k in keys}
    form = "{k} {v};" if simple and rng.random() < 0.6 else rng.choice(
        ("{k}: {v}", "{k} = {v}", "{k} is {v}.", "The value of {k} is {v}.", "{k} {v};", "{k}, {v}."))
    facts = [form.format(k=k, v=val[k]) for k in keys]
    todo, qas = list(keys), []
    rng.shuffle(todo)
    room = int(length * (0.95 - share))
    while todo and (room > 0 or not qas):
        if rng.random() < 0.6:
            m = min(len(todo), rng.randint(1, 8))
            ks = [todo.pop() for _ in range(m)]
            q, a = "Look up " + ", ".join(ks) + ".", " ".join(form.format(k=k, v=val[k]) for k in ks)
            lab = {"echo": 1}
        else:
            k = todo.pop()
            q = rng.choice((f"What is the value of {k}?", f"Look up the value of {k}.", f"Which value belongs to {k}?"))
            a = val[k]
            lab = {}
        room -= w.count(q) + w.count(a) + 12
        qas.append((q, a, lab))
    n_seg = n_segments(rng, length, mode)
    fill = rng.random() < 0.4
    return Plan("table", rng.choice(("Here is a table.\n", "Read this list of values.\n", "")), [""] * n_seg,
                spread(rng, facts, n_seg), qas, fill=fill, sep=rng.choice((" ", "\n")))


def link(rng, w, length, mode):
    """Two-step look-ups in dense lists: keys that point to keys that have values, all of one token."""
    lex = w.lex
    n = w.how_many(rng, length, 10, 90, train_low=4, share=0.55)
    keys = rng.sample(lex.easy, min(n, len(lex.easy) // 2))
    word = rng.random() < 0.5
    used, val, hop, right, order = set(keys), {}, {}, {}, []
    style = rng.randrange(4)
    for k in keys:
        live = [x for x in order if hop[x] < 3]
        if live and rng.random() < 0.6:
            t = rng.choice(live)
            val[k], hop[k], right[k] = val[t], hop[t] + 1, t
        else:
            v = rng.choice(lex.easy) if word else lex.number(rng, 2)
            while v in used and (word or len(used) < 60):
                v = rng.choice(lex.easy) if word else lex.number(rng, 2)
            used.add(v)
            val[k], hop[k], right[k] = v, 0, None
        order.append(k)
    eq, same, end = ((" = ", " = ", ";"), (": ", ": ", ";"), (" is ", " is the same as ", "."),
                     (" has ", " follows ", "."))[style]
    facts = [k + (same + right[k] if right[k] else eq + val[k]) + end for k in order]
    if rng.random() < 0.3:
        rng.shuffle(facts)
    room, qas, todo = int(length * 0.3), [], list(keys)
    rng.shuffle(todo)
    todo.sort(key=lambda k: hop[k] == 0)
    while todo and (room > 0 or not qas):
        k = todo.pop(0 if rng.random() < 0.8 else -1)
        q, a, m = f"What is the final value of {k}?", val[k], {"hops": hop[k]}
        if rng.random() < w.echo * 0.6:
            path, x = [], k
            while x:
                path.append(x)
                x = right[x]
            q, a, m = q + " Show the chain.", " = ".join(path + [val[k]]), {"hops": hop[k], "echo": 1}
        room -= w.count(q) + w.count(a) + 12
        qas.append((q, a, m))
    n_seg = n_segments(rng, length, mode)
    return Plan("link", "Read these links.\n", [""] * n_seg, spread(rng, facts, n_seg), qas, fill=rng.random() < 0.25,
                sep=rng.choice((" ", "\n")))
