"""Samples of several turns whose questions stand in front of a turn's new text, in the middle of it, or behind it.

shape growing: every turn brings new text; a question is about this turn's or an earlier one's.
      shared:  the first turn brings most of the text; later turns bring a little and ask about all of it.
      quiz:    the first turn brings all of the text; later turns are a question each, at the end.
family niah: the number of a key; niah_many: the numbers of two to four; vt: the value of a variable, over up to two
      assignments; names: who is married to somebody.
      _long: the answer is a sentence, or the chain of assignments; qa and qa_long: where somebody works, and in which
      town that is.
DEFAULT_FAMILIES are those that splice-tiny answers at every position, and whose answers have several tokens: the first
comes out of the prompt, the others each out of a decode step that has to look them up. The others are for other models;
docs/evaluation.md has the figures.
"""
import random

from lookups import join_and
from samples import ASSISTANT, FULL, LATER, SYSTEM, Sample, insert, turn

SHAPES = ("growing", "shared", "quiz")
DEFAULT_FAMILIES = ("niah", "vt", "names")
FAMILIES = DEFAULT_FAMILIES + ("niah_many", "niah_long", "vt_long", "qa", "qa_long")
POSITIONS = ("begin", "middle", "end")
NUM_TURNS = {"growing": 3, "shared": 4, "quiz": 10}
SEGMENT_TOKENS = 700  # of context, about


class Facts:
    """Sentences in the order in which they must stand, and questions about them: (question, answer, sentences)."""

    def __init__(self):
        self.sentences, self.questions = [], []

    def add(self, sentence):
        self.sentences.append(sentence)
        return len(self.sentences) - 1


def niah(rng, lex, n, variant):
    facts = Facts()
    keys, used = [], set()
    while len(keys) < n:
        k = lex.key(rng)
        # No two keys share a word: a model this small confuses them, whatever it attends to.
        if not used & set(k.split("-")):
            used |= set(k.split("-"))
            keys.append(k)
    number = {k: lex.number(rng, 7) for k in keys}
    for k in keys:
        facts.add(f"One of the special magic numbers for {k} is: {number[k]}.")
    if variant == "many":
        for _ in range(2 * n):
            some = rng.sample(range(n), rng.randint(2, 4))
            asked = [keys[i] for i in some]
            facts.questions.append((
                f"What are all the special magic numbers for {join_and(asked)} mentioned in the provided text?",
                ", ".join(number[k] for k in asked), some))
        return facts
    for i, k in enumerate(keys):
        q, v = f"What is the special magic number for {k} mentioned in the provided text?", number[k]
        if variant == "long":
            q, v = q + FULL, f"The special magic number for {k} is {v}."
        facts.questions.append((q, v, [i]))
    return facts


def names(rng, lex, n, variant):
    facts = Facts()
    people = list(dict.fromkeys(lex.person(rng) for _ in range(2 * n)))
    for a, b in zip(people[::2], people[1::2]):
        i = facts.add(f"{a} is married to {b}.")
        facts.questions.append((f"Who is married to {a}?", b, [i]))
    return facts


def vt(rng, lex, n, variant):
    facts = Facts()
    value, need, path = {}, {}, {}
    for v in lex.codes(rng, n):
        up = [x for x in value if len(path[x]) <= 2]
        if up and rng.random() < 0.5:
            source = rng.choice(up)
            value[v], path[v] = value[source], [v] + path[source]
            need[v] = need[source] + [facts.add(f"VAR {v} = VAR {source}.")]
        else:
            value[v], path[v] = lex.number(rng, 5), [v]
            need[v] = [facts.add(f"VAR {v} = {value[v]}.")]
        q = f"What is the value of VAR {v}?"
        if variant == "long":
            facts.questions.append((q + " Show the chain.", " = ".join("VAR " + x for x in path[v]) + " = " + value[v],
                                    need[v]))
        else:
            facts.questions.append((q, value[v], need[v]))
    return facts


def qa(rng, lex, n, variant):
    facts = Facts()
    codes = lex.codes(rng, 2 * max(2, n // 3), spoken=True)
    companies, towns = codes[:len(codes) // 2], codes[len(codes) // 2:]
    based = {}
    for c in companies:
        t = rng.choice(towns)
        based[c] = (t, facts.add(f"Company {c} is based in town {t}."))
    for p in dict.fromkeys(lex.person(rng) for _ in range(n - len(companies))):
        c = rng.choice(companies)
        works = f"{p} works at company {c}."
        i = facts.add(works)
        t, j = based[c]
        if variant == "long":
            facts.questions.append((f"At which company does {p} work?" + FULL, works, [i]))
            facts.questions.append((f"In which town does {p} work? Explain your answer.",
                                    f"{works} {facts.sentences[j]} The answer is {t}.", [i, j]))
        else:
            facts.questions.append((f"At which company does {p} work?", c, [i]))
            facts.questions.append((f"In which town does {p} work?", t, [i, j]))
    return facts


MAKERS = {"niah": niah, "names": names, "vt": vt, "qa": qa}


def segments_of_turns(shape, length):
    """How many segments of context each turn brings."""
    total = max(4, length // SEGMENT_TOKENS)
    turns = NUM_TURNS[shape]
    if shape == "growing":
        return [max(2, total // turns)] * turns
    if shape == "shared":
        return [max(2, total - turns + 1)] + [1] * (turns - 1)
    return [total] + [0] * (turns - 1)


def choose_questions(rng, facts, where, segments):
    """A question for each turn, about what stands there by then, half of them about the turn's own text; or None."""
    chosen, end = [], 0
    for count in segments:
        begin, end = end, end + count
        ready = [q for q in facts.questions if q not in chosen and max(where[i] for i in q[2]) < end]
        own = [q for q in ready if max(where[i] for i in q[2]) >= begin]
        if not ready:
            return None
        chosen.append(rng.choice(own if own and rng.random() < 0.5 else ready))
    return chosen


def draw(rng, world, length, shape, family, first_position):
    """One sample of at most `length` tokens. The position of the first turn's question is POSITIONS[first_position],
    later turns take the next ones."""
    segments = segments_of_turns(shape, length)
    name, _, variant = family.partition("_")
    num_facts = {"growing": 12, "shared": 14, "quiz": 20}[shape]
    while True:
        facts = MAKERS[name](rng, world.lex, num_facts, variant)
        where = [rng.randrange(sum(segments)) for _ in facts.sentences]
        if name == "vt":
            where.sort()  # an assignment stands behind those it refers to
        questions = choose_questions(rng, facts, where, segments)
        if questions:
            break
    positions = [POSITIONS[(first_position + t) % 3] if count else "end" for t, count in enumerate(segments)]
    count = world.count
    fixed = count(SYSTEM) + 10 + sum(count(" " + f) for f in facts.sentences) + 3 * sum(segments)
    fixed += sum(2 * count(q) + count(a) + 26 for q, a, _ in questions)
    # A later turn of the shared shape brings a quarter of what each of the first one's segments holds.
    weights = [1.0 if shape != "shared" or t == 0 else 0.25 for t, n in enumerate(segments) for _ in range(n)]
    room = (length - fixed) / sum(weights)
    if room < 16:
        return None

    sample = Sample(f"{shape}_{family}", shape=shape, family=family, positions=positions,
                    needs=[len(need) for _, _, need in questions])
    sample.add("new", "<|begin_of_text|>" + turn("system", SYSTEM))
    at = 0
    for t, (q, a, _) in enumerate(questions):
        n = segments[t]
        cut = {"begin": 0, "middle": max(1, n // 2), "end": -1}[positions[t]]
        pieces = []
        for k in range(n):
            filler = world.filler.take(rng, int(room * weights[at]) - 2)
            if n == 1 and cut == 1:  # one segment only: the question stands between its halves
                pieces += [filler[:len(filler) // 2], filler[len(filler) // 2:]]
            else:
                pieces.append(filler)
            own = [s for s, w in zip(facts.sentences, where) if w == at]
            half = [s for s in own if rng.random() < 0.5] if n == 1 and cut == 1 and name != "vt" else own
            if n == 1 and cut == 1:
                pieces[-2] = insert(rng, pieces[-2], half)
                pieces[-1] = insert(rng, pieces[-1], [s for s in own if s not in half])
            else:
                pieces[-1] = insert(rng, pieces[-1], own)
            at += 1
        sample.add("new", "<|im_start|>user\n" + (f"Question: {q}\n" if cut == 0 else ""))
        for k, sentences in enumerate(pieces):
            if k == cut and k > 0:
                sample.add("new", f"Question: {q}\n")
            if sentences:
                sample.add("reuse", "<|seg|>" + " ".join(sentences).rstrip() + "\n")
        sample.add("new", (q if cut == -1 else LATER[0]) + "<|im_end|>\n" + ASSISTANT)
        sample.add("ans", a)
        sample.add("new", "\n")
        sample.answers.append(a)
    return sample


def rng_of(seed, shape, family, length, index):
    """Each sample has numbers of its own: a set of more samples begins with those of a smaller one."""
    return random.Random(f"turns/{seed}/{shape}/{family}/{length}/{index}")
