"""What a synthetic long-context sample is made of, for training and for the evaluation sets.

A sample is a list of pieces. Concatenating the pieces' texts gives the whole chat text, and
tokenising piece by piece gives the same ids as tokenising the whole, because every piece ends in
a newline or in a special token and none begins with white space.

Classes of tokens in encode(): 1 context, 2 answer, 3 plain text, 4 first token of a short answer (where
the look-up is decided).

piece kinds: "new"    instructions and questions, computed afresh in a serving system
             "reuse"  context segments whose KV caches could be reused
             "ans"    what the assistant must say (the loss is heavy here)
             "lm"     plain text

Most tasks build a Plan (facts per segment and question-answer pairs); assemble() adds filler text
until the sample has the wanted length, places the questions, and makes the pieces.
"""
from lexicon import Lexicon, NoiseFiller

SYSTEM = "You are a helpful assistant."
SYSTEMS = [SYSTEM, SYSTEM, SYSTEM, "Answer the user's questions from the given text.", "Be brief and exact.",
           "You are a careful reader.", "Answer with as few words as possible."]
LATER = ["Answer the question asked above.", "Now answer the question that was asked above.",
         "Please answer the question above."]
CLASS = {"new": 1, "reuse": 1, "ans": 2, "lm": 3}


class Sample:
    def __init__(self, task, **meta):
        self.task, self.meta, self.pieces, self.answers, self.labels = task, meta, [], [], []

    def add(self, kind, text):
        if text:
            self.pieces.append((kind, text))

    def encode(self, tok):
        ids, cls = [], []
        for kind, text in self.pieces:
            n = len(ids)
            if kind == "ans":
                tok.encode_plain(text, ids)
                ids.append(tok.im_end)
                cls += [4] + [2] * (len(ids) - n - 1)
            else:
                ids += tok.encode(text)
                cls += [CLASS[kind]] * (len(ids) - n)
        return ids, cls


class World:
    """Everything a task draws from: words of one split, filler text, token counts."""

    def __init__(self, split, words, filler, count):
        self.lex = Lexicon(split, words, count)
        self.ease = 0.0  # early in training: shorter keys and names
        self.paragraphs = 0.0  # share of plain-text samples that keep their line breaks
        self.words = 0.3  # share of variable samples whose names are words of one token
        self.echo = 0.2  # share of training questions answered in a full sentence
        self.filler = filler
        self.noise = NoiseFiller(count)
        self.count = count
        self.split = split

    def how_many(self, rng, length, cost, cap, train_low=1, share=0.6):
        """A random number of facts for a training sample: as many as fit, or log-uniform below that."""
        top = max(train_low, min(cap, int(length * share / cost)))
        if top <= train_low:
            return train_low
        if rng.random() < 0.1 + 0.5 * self.ease:
            return top
        return int(round(train_low * (top / train_low) ** rng.random()))


class Plan:
    def __init__(self, task, prefix, heads, facts, qas, ends=None, **meta):
        self.task, self.prefix = task, prefix
        self.heads = heads            # text opening each segment ("" for none)
        self.facts = facts            # list of facts per segment, in order
        self.ends = ends or [""] * len(facts)  # text closing each segment
        self.qas = qas                # [(question, answer, meta)]
        self.meta = meta
        self.fill = meta.pop("fill", True)
        self.sep = meta.pop("sep", None)


class Mode:
    """How samples are shaped. train: random shapes; otherwise the fixed evaluation form."""

    def __init__(self, train=True, segments=4, position="end", questions=1):
        self.train, self.segments, self.position, self.questions = train, segments, position, questions


def spread(rng, facts, n_seg, ordered=True):
    """Put facts (kept in order) into n_seg segments at random."""
    out = [[] for _ in range(n_seg)]
    where = sorted(rng.randrange(n_seg) for _ in facts)
    if not ordered:
        rng.shuffle(where)
    for f, w in zip(facts, where):
        out[w].append(f)
    return out


def insert(rng, filler, facts):
    """Facts, in order, between filler sentences."""
    at = sorted(rng.randint(0, len(filler)) for _ in facts)
    out, k = [], 0
    for i, f in zip(at, facts):
        out += filler[k:i]
        out.append(f)
        k = i
    return out + filler[k:]


def turn(role, text):
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


ASSISTANT = "<|im_start|>assistant\n"
FULL = " Answer in a full sentence."
CHAT_FACT = 20  # tokens that the two turns around a fact take


def n_segments(rng, length, mode):
    if not mode.train:
        return mode.segments
    return rng.choice((1, 2, 3, 4, 4, 6, 8)) if length >= 512 else rng.choice((1, 2, 3, 4))


def assemble(plan, rng, w, length, mode):
    """Pieces of about (never more than) `length` tokens."""
    count = w.count
    train = mode.train
    system = rng.choice(SYSTEMS) if train else SYSTEM
    seg_tok = "<|seg|>" if not train or rng.random() < 0.7 else ""
    position = mode.position
    if train:
        apart = 0.15 * (1 - w.ease)
        position = rng.choices(("end", "begin", "middle"), (1 - 2 * apart, apart, apart))[0]
    sep = plan.sep or (" " if not train or rng.random() < 0.8 else "\n")
    qas = plan.qas
    chat = plan.task == "memory"
    head = "<|begin_of_text|>" + turn("system", system)
    body_open = "" if chat else "<|im_start|>user\n"
    q0 = qas[0][0]
    prefix = plan.prefix
    if position == "begin":
        prefix += f"Question: {q0}\n"
    middle = f"Question: {q0}\n" if position == "middle" else ""
    closing = q0 if position == "end" else (rng.choice(LATER) if train else LATER[0])
    if chat:
        opening = head + (turn("user", prefix.rstrip("\n")) + turn("assistant", "I will.") if prefix else "")
        middle = turn("user", middle.rstrip("\n")) + turn("assistant", "I will answer later.") if middle else ""
        suffix = "<|im_start|>user\n" + closing + "<|im_end|>\n" + ASSISTANT
    else:
        opening = head + body_open + prefix
        suffix = closing + "<|im_end|>\n" + ASSISTANT
    rest = []
    for q, a, _ in qas[1:]:
        rest.append((turn("user", q) + ASSISTANT, a))
    fixed = count(opening) + count(middle) + count(suffix) + count(qas[0][1]) + 4
    fixed += sum(count(q) + count(a) + 3 for q, a in rest)
    n = len(plan.facts)
    for h, fs, e in zip(plan.heads, plan.facts, plan.ends):
        fixed += count(h) + count(e) + 2 + (1 if seg_tok else 0)
        fixed += sum(count(" " + f) for f in fs)
        if chat:
            fixed += CHAT_FACT * len(fs)
    room = length - fixed
    if room < 0:
        return None
    fill = w.filler
    if train and rng.random() < 0.1:
        fill = w.noise
    bodies = []
    for h, fs, e in zip(plan.heads, plan.facts, plan.ends):
        sents = []
        if plan.fill:
            share = room // n
            if train and n > 1:
                share = int(share * rng.uniform(0.6, 1.0))
            sents = fill.take(rng, share - 2 if not chat else int(share * 0.84) - 28)
        if chat:
            body = chat_body(rng, sents, fs)
        else:
            body = h + sep.join(insert(rng, sents, fs)) + e
            body = body and body.rstrip() + "\n"
        if body:
            bodies.append(seg_tok + body)
    n = len(bodies)
    s = Sample(plan.task, **plan.meta, **qas[0][2], position=position)
    cut = rng.randint(1, n - 1) if n > 1 and middle else (n if middle else -1)
    s.add("new", opening)
    for i, b in enumerate(bodies):
        if i == cut:
            s.add("new", middle)
        s.add("reuse", b)
    if cut == n:
        s.add("new", middle)
    s.add("new", suffix)
    s.add("ans", qas[0][1])
    s.answers = [a for _, a, _ in qas]
    s.labels = [label(plan, m) for _, _, m in qas]
    for q, a in rest:
        s.add("new", "\n" + q)
        s.add("ans", a)
    s.add("new", "\n")
    return s


def label(plan, meta):
    """Name under which an answer's accuracy is counted."""
    name = plan.task
    if "variant" in plan.meta:
        name += "_" + plan.meta["variant"]
    for key in ("hops", "updates", "kind"):
        if key in meta:
            name += f"_{key[0]}{meta[key]}" if key != "kind" else "_" + meta[key]
    return name + ("_echo" if "echo" in meta else "")


def chat_body(rng, sents, facts):
    """A chat session: the user states facts and tells a story, the assistant acknowledges."""
    out, i, k = [], 0, 0
    order = ["f"] * len(facts) + ["s"] * max(1, len(sents) // 6 if sents else 0)
    if not sents:
        order = ["f"] * len(facts)
    rng.shuffle(order)
    per = max(1, -(-len(sents) // max(1, order.count("s"))))
    for o in order:
        if o == "f":
            thanks = rng.choice(("Noted.", "Thank you, noted.", "I see."))
            out.append(turn("user", facts[k]) + turn("assistant", thanks))
            k += 1
        else:
            chunk = sents[i:i + per]
            i += per
            if chunk:
                half = rng.randint(0, len(chunk))
                u = " ".join(chunk[:half]) or "Go on."
                a = " ".join(chunk[half:]) or "Go on."
                out.append(turn("user", u) + turn("assistant", a))
    return "".join(out)


def n_questions(rng, length, mode, available):
    if not mode.train:
        return min(mode.questions, available)
    top = max(2, min(24, length // 160))
    return max(1, min(available, rng.randint((top + 1) // 2, top)))
