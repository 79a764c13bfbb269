"""Conversations: what a user has said and corrected, what several agents have answered."""
from collections import Counter

from lexicon import ATTRIBUTES
from samples import FULL, Plan, n_questions, n_segments, spread


def memory(rng, w, length, mode):
    lex = w.lex
    if mode.train:
        n = w.how_many(rng, length, 42, 40, train_low=2)
    else:
        n = 10 if length < 1500 else 16
    people = [None] + list(dict.fromkeys(lex.person(rng) for _ in range(max(1, n // 4))))
    facts, state, order = [], {}, []
    while len(facts) < n:
        if state and rng.random() < 0.3:
            key = rng.choice(list(state))
            again = True
        else:
            key = (rng.choice(people), rng.choice(list(ATTRIBUTES)))
            again = key in state
        who, attr = key
        v = lex.value(rng, ATTRIBUTES[attr])
        if again and state[key][0] == v:
            continue
        whose = "My" if who is None else who + "'s"
        if again:
            low = "my" if who is None else whose
            text = rng.choice((f"Correction: {low} {attr} is now {v}.", f"By the way, {low} {attr} is now {v}."))
        else:
            text = f"{whose} {attr} is {v}."
        state[key] = (v, state[key][1] + 1 if again else 0)
        facts.append(text)
    keys = list(state)
    rng.shuffle(keys)
    if not mode.train:
        keys.sort(key=lambda k: -min(1, state[k][1]) if rng.random() < 0.5 else 0)
    qas = []
    for k in keys[:n_questions(rng, length, mode, len(keys))]:
        who, attr = k
        whose = "my" if who is None else who + "'s"
        q, a, m = f"What is {whose} {attr}?", state[k][0], {"updates": state[k][1]}
        if mode.train and rng.random() < w.echo:
            q, a = q + FULL, f"{'Your' if who is None else whose} {attr} is {a}."
            m["echo"] = 1
        qas.append((q, a, m))
    n_seg = n_segments(rng, length, mode)
    prefix = "Please remember what I tell you.\n" if not mode.train or rng.random() < 0.6 else ""
    segs = spread(rng, facts, n_seg)
    while not mode.train and length < 5000 and not all(segs):
        segs = spread(rng, facts, n_seg)
    return Plan("memory", prefix, [""] * n_seg, segs, qas)


def agents(rng, w, length, mode, variant=None):
    lex = w.lex
    if mode.train:
        n = w.how_many(rng, length, 40, 16, train_low=3)
    else:
        n = max(5, mode.segments)
    if not mode.train or rng.random() < 0.7:
        names = lex.codes(rng, n)
    else:
        names = list(dict.fromkeys(lex.name(rng) for _ in range(n)))
    kind = rng.choice(("number", "word")) if mode.train else "number"
    answers = [lex.number(rng, 3) if kind == "number" else lex.word(rng) for _ in range(rng.randint(2, 4))]
    pool = list(dict.fromkeys(answers))
    weights = [2.5] + [1.0] * (len(pool) - 1)
    said, facts = {}, []
    for i, a in enumerate(names):
        r = rng.random()
        if i and r < 0.2:
            said[a] = said[names[i - 1]]
            facts.append("I agree with the previous agent.")
        elif i and r < 0.35:
            other = rng.choice(names[:i])
            said[a] = said[other]
            facts.append(f"I agree with Agent {other}.")
        else:
            said[a] = rng.choices(pool, weights)[0]
            facts.append(rng.choice((f"I think the answer is {said[a]}.", f"My answer is {said[a]}.",
                                     f"The answer must be {said[a]}.")))
    votes = Counter(said.values()).most_common()
    qs = []
    who = [(f"Which answer did Agent {a} give?", said[a], {"kind": "agree" if "agree" in f else "plain"})
           for a, f in zip(names, facts)]
    major = []
    if len(votes) == 1 or votes[0][1] > votes[1][1]:
        major.append(("Which answer was given by most agents?", votes[0][0], {"kind": "majority"}))
    which = [(f"Which agents gave the answer {v}?", ", ".join(a for a in names if said[a] == v), {"kind": "which"})
             for v, _ in votes]
    if mode.train:
        who = [(q + FULL, f"Agent {x} gave the answer {a}.", {**m, "echo": 1}) if rng.random() < w.echo else (q, a, m)
               for (q, a, m), x in zip(who, names)]
        qs = who + major + which
        rng.shuffle(qs)
    elif variant == "majority":
        qs = major
    else:
        want = rng.choice(("agree", "plain"))
        qs = [q for q in who if q[2]["kind"] == want] or who
        rng.shuffle(qs)
    if not qs:
        return None
    qs = qs[:n_questions(rng, length, mode, len(qs))]
    return Plan("agents", "Several agents discuss a problem. Here are their messages.\n",
                [f"Agent {a}: " for a in names], [[f] for f in facts], qs, sep=" ")
