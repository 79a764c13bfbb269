"""Several turns, each with its own context."""
from samples import ASSISTANT, LATER, SYSTEM, SYSTEMS, Sample, insert, turn


def multiturn(rng, w, length, mode):
    """Every turn brings new context and a question, before, between or after its segments, about
    this turn's context or an earlier one's."""
    lex = w.lex
    family = rng.choice(("niah", "vt", "qa"))
    n_turn = rng.randint(2, 4) if mode.train else 3
    per = rng.randint(1, 3) if mode.train else max(2, mode.segments // 3)
    n_seg = n_turn * per
    facts, where, qs = [], [], []
    if family == "niah":
        n = w.how_many(rng, length, 34, 40, train_low=n_turn) if mode.train else 9
        keys = list(dict.fromkeys(lex.key(rng) for _ in range(n)))
        for i, k in enumerate(keys):
            v = lex.number(rng, rng.choice((5, 6, 7)) if mode.train else 7)
            facts.append(f"One of the special magic numbers for {k} is: {v}.")
            qs.append((f"What is the special magic number for {k} mentioned in the provided text?", v, [i]))
        where = [rng.randrange(n_seg) for _ in facts]
    elif family == "vt":
        n = w.how_many(rng, length, 20, 40, train_low=4) if mode.train else 12
        if not mode.train or rng.random() < 0.7:
            names = lex.codes(rng, n)
        else:
            names = list(dict.fromkeys(lex.variable(rng, 3) for _ in range(n)))
        val, need, depth = {}, {}, {}
        for i, v in enumerate(names):
            up = [x for x in names[:i] if depth[x] < 3]
            if up and rng.random() < 0.6:
                src = rng.choice(up)
                val[v], need[v], depth[v] = val[src], need[src] + [i], depth[src] + 1
                facts.append(f"VAR {v} = VAR {src}.")
            else:
                val[v], need[v], depth[v] = lex.number(rng, 5), [i], 0
                facts.append(f"VAR {v} = {val[v]}.")
            qs.append((f"What is the value of VAR {v}?", val[v], need[v]))
        where = sorted(rng.randrange(n_seg) for _ in facts)
    else:
        n = w.how_many(rng, length, 30, 24, train_low=3) if mode.train else 6
        people = list(dict.fromkeys(lex.person(rng) for _ in range(n)))
        names = lex.codes(rng, 2 * max(2, n // 2), spoken=True)
        comps, towns = names[:len(names) // 2], names[len(names) // 2:]
        seat = {}
        for c in comps:
            seat[c] = rng.choice(towns)
            facts.append(f"Company {c} is based in town {seat[c]}.")
            qs.append((f"In which town is company {c} based?", seat[c], [len(facts) - 1]))
        for x in people:
            c = rng.choice(comps)
            facts.append(f"{x} works at company {c}.")
            qs.append((f"At which company does {x} work?", c, [len(facts) - 1]))
            qs.append((f"In which town does {x} work?", seat[c], [len(facts) - 1, comps.index(c)]))
        where = [rng.randrange(n_seg) for _ in facts]
    segs = [[] for _ in range(n_seg)]
    for f, k in zip(facts, where):
        segs[k].append(f)
    last = [max(where[i] for i in need) for _, _, need in qs]
    turns, used = [], set()
    for t in range(n_turn):
        ready = [i for i in range(len(qs)) if last[i] < (t + 1) * per and i not in used]
        if not ready:
            return None
        here = [i for i in ready if last[i] >= t * per]
        i = rng.choice(here if here and rng.random() < 0.5 else ready)
        used.add(i)
        turns.append(qs[i])
    system = rng.choice(SYSTEMS) if mode.train else SYSTEM
    seg_tok = "<|seg|>" if not mode.train or rng.random() < 0.7 else ""
    count = w.count
    fixed = count(system) + 10 + sum(count(" " + f) for f in facts) + 3 * n_seg
    fixed += sum(2 * count(q) + count(a) + 26 for q, a, _ in turns)
    room = (length - fixed) // n_seg
    if room < 0:
        return None
    s = Sample("multiturn", family=family)
    s.add("new", "<|begin_of_text|>" + turn("system", system))
    fill = w.noise if mode.train and rng.random() < 0.1 else w.filler
    for t, (q, a, need) in enumerate(turns):
        position = mode.position if not mode.train else rng.choice(("begin", "middle", "end"))
        cut = {"begin": 0, "middle": max(1, per // 2), "end": -1}[position]
        text = "<|im_start|>user\n"
        for k in range(per):
            if k == cut:
                text += f"Question: {q}\n"
            if text:
                s.add("new", text)
                text = ""
            j = t * per + k
            share = int(room * rng.uniform(0.6, 1.0)) if mode.train else room
            body = " ".join(insert(rng, fill.take(rng, share - 2), segs[j])).rstrip()
            if body:
                s.add("reuse", seg_tok + body + "\n")
        if cut == per:
            s.add("new", f"Question: {q}\n")
        s.add("new", (q if cut == -1 else LATER[0]) + "<|im_end|>\n" + ASSISTANT)
        s.add("ans", a)
        s.add("new", "\n")
        s.answers.append(a)
        s.labels.append(f"multiturn_{family}{len(need)}")
    s.meta.update(position=mode.position, needs=[len(n) for _, _, n in turns])
    return s
