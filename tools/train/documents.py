"""Facts in documents, asked over one to three of them, and articles cut into chunks."""
from lexicon import COLOURS
from samples import FULL, Plan, n_questions, n_segments


QA_PREFIX = ["Answer the questions based on the given documents. Only give me the answer and do not output any other "
             "words.\n", "The following are given documents.\n", "Read these documents.\n"]


def qa(rng, w, length, mode, hops=None, coded=True, split=False):
    """Facts about people, companies and places, one document each; questions over one to three documents.
    coded: companies, towns and countries are called by code words; otherwise by made-up names.
    split (evaluation only): documents are cut between two segments, the title before the cut and "The company
    is ..." behind it, so that the second segment alone does not say which company is meant."""
    lex = w.lex
    if mode.train:
        n_docs = w.how_many(rng, length, 30, 72, train_low=4)
        coded = rng.random() < 0.75
    else:
        n_docs = 12 if length < 1500 else 20
    n_city = max(2, n_docs // 4)
    n_comp = max(2, n_docs // 3)
    n_pers = max(2, n_docs - n_city - n_comp)
    make = lambda f, k: list(dict.fromkeys(f(rng) for _ in range(k)))
    people = make(lex.person, n_pers)
    if coded:
        names = lex.codes(rng, 2 * n_city + n_comp, spoken=True)
        cities, lands, comps = names[:n_city], names[n_city:2 * n_city], names[2 * n_city:]
        company, town, country, place = "company ", "town ", "country ", "town"
    else:
        cities, comps, lands = make(lex.city, n_city), make(lex.company, n_comp), make(lex.country, n_city)
        company, town, country, place = "", "", "", "city"
    up = lambda x: x[:1].upper() + x[1:]
    seat = {c: rng.choice(cities) for c in comps}
    land = {c: rng.choice(lands) for c in cities}
    job = {p: rng.choice(comps) for p in people}
    born = {p: rng.choice(cities) for p in people}
    mate = {}
    shuffled = list(people)
    rng.shuffle(shuffled)
    for a, b in zip(shuffled[::2], shuffled[1::2]):
        mate[a], mate[b] = b, a
    works = {p: f"{p} works at {company}{job[p]}." for p in people}
    birth = {p: f"{p} was born in {town}{born[p]}." for p in people}
    wed = {p: f"{p} is married to {q}." for p, q in mate.items()}
    based = {c: f"{up(company + c)} is based in {town}{seat[c]}." for c in comps}
    lies = {t: f"{up(town + t)} is located in {country}{land[t]}." for t in cities}
    pro = split or mode.train and rng.random() < 0.3
    docs = []
    for p in people:
        fs = [works[p], birth[p]] + ([wed[p]] if p in wed else [])
        if mode.train and n_docs * 45 > length:
            fs = rng.sample(fs, 2)
        docs.append((p, p, fs))
    for c in comps:
        docs.append((c, company + c, [f"The company is based in {town}{seat[c]}." if pro else based[c]]))
    for t in cities:
        docs.append((t, town + t, [f"The {place} is located in {country}{land[t]}." if pro else lies[t]]))
    rng.shuffle(docs)
    have = set(f for _, _, fs in docs for f in fs)
    one, two, three = [], [], []
    which = "At which company does" if coded else "Where does"
    for p in people:
        if works[p] in have:
            c = job[p]
            one.append((f"{which} {p} work?", c, (p,), works[p]))
            two.append((f"In which {place} does {p} work?", seat[c], (p, c), works[p] + " " + based[c]))
            three.append((f"In which country does {p} work?", land[seat[c]], (p, c, seat[c]),
                          works[p] + " " + based[c] + " " + lies[seat[c]]))
        if birth[p] in have:
            t = born[p]
            one.append((f"In which {place} was {p} born?", t, (p,), birth[p]))
            two.append((f"In which country was {p} born?", land[t], (p, t), birth[p] + " " + lies[t]))
        if p in wed and wed[p] in have:
            q = mate[p]
            one.append((f"Who is married to {p}?", q, (p,), wed[p]))
            if works[q] in have and mode.train:
                two.append((f"{which} the spouse of {p} work?", job[q], (p, q), wed[p] + " " + works[q]))
    for c in comps:
        one.append((f"In which {place} is {company}{c} based?", seat[c], (c,), based[c]))
        two.append((f"In which country is {company}{c} based?", land[seat[c]], (c, seat[c]),
                    based[c] + " " + lies[seat[c]]))
    for t in cities:
        one.append((f"In which country is {town}{t} located?", land[t], (t,), lies[t]))
    pools = {1: one, 2: two, 3: three}
    want = n_questions(rng, length, mode, len(one) + len(two))
    picked = []
    while len(picked) < want:
        h = hops if not mode.train else rng.choices((1, 2, 3), (0.35, 0.5, 0.15))[0]
        if not pools[h]:
            h = 1 if pools[1] else 2
        if not pools[h]:
            break
        q, a, path, why = pools[h].pop(rng.randrange(len(pools[h])))
        m = {"hops": h, "path": path}
        if mode.train and rng.random() < w.echo:
            m["echo"] = 1
            if h == 1:
                q, a = q + FULL, why
            else:
                q, a = q + " Explain your answer.", why + " The answer is " + a + "."
        picked.append((q, a, m))
    # documents into segments; bridge documents in different segments, no segment empty
    n = n_segments(rng, length, mode)
    path = picked[0][2]["path"]
    if split:
        for q in picked:
            q[2].pop("path")
        heads, groups, ends = cut_documents(rng, docs, path, n, people)
        return Plan("qa", QA_PREFIX[0], heads, groups, picked[:1], ends=ends, variant="split")
    best, score = None, -1
    for _ in range(1 if mode.train else 200):
        where = {d: rng.randrange(n) for d, _, _ in docs}
        sc = len({where[d] for d in path}) + n * len(set(where.values()))
        if sc > score:
            best, score = where, sc
        if sc == min(n, len(path)) + n * min(n, len(docs)):
            break
    segs = [[] for _ in range(n)]
    titled = not mode.train or rng.random() < 0.7
    for d, title, fs in docs:
        if titled or pro:
            fs = [f"Document: {title}."] + fs
        segs[best[d]].append(" ".join(fs))
    for q in picked:
        q[2].pop("path")
    prefix = rng.choice(QA_PREFIX) if mode.train else QA_PREFIX[0]
    extra = {} if coded else {"variant": "names"}
    return Plan("qa", prefix, [""] * n, segs, picked, **extra)


def cut_documents(rng, docs, path, n, people):
    """Segment heads, facts and ends such that every cut falls between a document's title and its fact."""
    able = [d for d in docs if d[0] not in people]
    rng.shuffle(able)
    able.sort(key=lambda d: d[0] not in path)
    cuts = able[:n - 1]
    rng.shuffle(cuts)
    rest = [d for d in docs if d not in cuts]
    groups = [[] for _ in range(n)]
    for d in rest:
        groups[rng.randrange(n)].append(f"Document: {d[1]}. " + " ".join(d[2]))
    heads, ends = [""] * n, [""] * n
    for j, d in enumerate(cuts):
        ends[j] = f" Document: {d[1]}."
        heads[j + 1] = " ".join(d[2]) + " "
    return heads, groups, ends


KINDS = {"company": ("registration number", "founder", "colour", "motto"),
         "town": ("postal number", "mayor", "colour", "river"),
         "ship": ("hull number", "captain", "colour", "home port"),
         "school": ("telephone number", "director", "colour", "motto"),
         "hotel": ("telephone number", "owner", "colour", "city")}


def coref(rng, w, length, mode):
    """Articles about named things, each cut into chunks; only the first chunk says the name."""
    lex = w.lex
    if mode.train:
        n_art = w.how_many(rng, length, 70, 14, train_low=2, share=0.8)
        n_chunk = rng.choice((1, 2, 2, 3, 4))
        n_attr = rng.randint(1, 4)
        same = rng.random() < 0.6
        kinds = [rng.choice(list(KINDS))] * n_art if same else [rng.choice(list(KINDS)) for _ in range(n_art)]
    else:
        n_art, n_chunk, n_attr = 4, max(2, mode.segments // 4), 3
        kinds = [rng.choice(list(KINDS))] * n_art
    heads, facts, qs = [], [], []
    if not mode.train or rng.random() < 0.7:
        titles = lex.codes(rng, n_art)
    else:
        titles = list(dict.fromkeys(lex.name(rng) for _ in range(n_art)))
    for kind, x in zip(kinds, titles):
        attrs = rng.sample(KINDS[kind], n_attr) if mode.train else list(KINDS[kind])[:n_attr]
        chunks = [[] for _ in range(n_chunk)]
        lead = f"Article: {x}. {x} is a {kind}."
        for a in attrs:
            if "number" in a:
                v = lex.number(rng, 4)
            elif a in ("founder", "mayor", "captain", "director", "owner"):
                v = lex.person(rng)
            elif a == "colour":
                v = rng.choice(COLOURS)
            elif a in ("home port", "city"):
                v = lex.city(rng)
            else:
                v = lex.name(rng)
            first = 0 if n_chunk == 1 else 1
            k = rng.randrange(first, n_chunk)
            chunks[k].append(f"The {kind}'s {a} is {v}.")
            if mode.train and rng.random() < w.echo:
                qs.append((f"What is the {a} of {x}?" + FULL, f"The {a} of {x} is {v}.", {"echo": 1}))
            else:
                qs.append((f"What is the {a} of {x}?", v, {}))
        for j, c in enumerate(chunks):
            heads.append(lead + " " if j == 0 else "")
            facts.append(c)
    rng.shuffle(qs)
    qs = qs[:n_questions(rng, length, mode, len(qs))]
    prefix = "Here are some articles, each cut into several parts. Read them in order.\n"
    if mode.train and rng.random() < 0.5:
        prefix = rng.choice(("Read the articles.\n", "The following are parts of articles.\n"))
    return Plan("coref", prefix, heads, facts, qs, sep=" ")
