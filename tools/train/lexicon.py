"""Words and names of the synthetic tasks. Every word belongs to one split by its hash:
dev and heldout words never occur as keys, names or values in training samples."""
import pathlib
import re
import zlib
from bisect import bisect_right
from collections import Counter
from itertools import accumulate

SPLITS = ("train", "dev", "heldout")


def split_of(word):
    h = zlib.crc32(word.lower().encode()) % 10
    return {0: "dev", 1: "heldout"}.get(h, "train")


ONSETS = "b br c ch cl d dr f fl g gl gr h j k kr l m n p pl pr qu r s sh sk st t th tr v w z".split()
VOWELS = "a e i o u ai ea oo".split()
CODAS = ["", "", "", "l", "n", "r", "s", "m", "x", "nd", "rk", "ll", "st", "ck"]

FIRST = ("Ada Alan Alice Amos Anna Arthur Ben Bertha Boris Carl Carol Cecil Clara Colin Daisy David Diana Dora "
         "Edgar Edith Ellen Elmer Emil Ethel Eva Felix Fiona Flora Frank Freda George Gerald Gina Grace Greta "
         "Harold Hazel Helen Henry Hilda Hugo Ida Igor Irene Ivan Ivy Jack James Jane Jasper Joan Jonas Judith "
         "Julia Karl Kate Kenneth Laura Leo Lewis Lily Linda Louis Lucy Lydia Mabel Marco Maria Martin Mary Maud "
         "Max Mildred Mina Nathan Nell Nina Nora Norman Oliver Olga Oscar Otto Pamela Paul Pearl Percy Peter Petra "
         "Philip Rachel Ralph Raymond Rita Robert Rosa Ruth Samuel Sara Simon Stella Susan Sylvia Theodor Thomas "
         "Tina Ulrich Vera Victor Violet Walter Wanda Wendy Wilfred William Xenia Yvonne Zelda").split()

CATEGORIES = {
    "animal": "horse dog cat sheep goat cow pig lion tiger bear wolf fox rabbit deer mouse rat monkey camel donkey "
              "elephant snake frog bull calf lamb".split(),
    "food": "bread butter cheese cake pie soup beef mutton bacon sugar honey salt pepper rice apple pear plum cherry "
            "orange lemon potato onion egg jelly pudding".split(),
    "clothing": "hat coat shirt boot shoe glove scarf cloak gown bonnet apron stocking trousers waistcoat jacket "
                "dress skirt shawl veil ribbon collar belt slipper cap robe".split(),
    "furniture": "table chair sofa bed desk shelf cupboard stool bench drawer cradle mirror carpet curtain lamp "
                 "clock wardrobe couch mattress pillow blanket candle chest stove basin".split(),
    "body": "arm leg hand foot head eye ear nose mouth chin neck shoulder elbow knee finger thumb toe heart lung "
            "brain stomach tooth tongue lip cheek".split(),
    "weather": "rain snow wind storm thunder lightning fog mist frost ice hail cloud sunshine breeze gale flood "
               "drought heat cold dew tempest shower rainbow damp drizzle".split(),
    "transport": "ship boat carriage coach cart wagon train ferry sledge raft canoe barge omnibus cab chariot yacht "
                 "steamer saddle railway bridge harbour wheel anchor oar sail".split(),
    "weapon": "sword gun pistol dagger rifle spear bow arrow shield cannon knife axe club lance musket sabre bullet "
              "powder armour helmet hatchet bayonet whip sling trap".split(),
    "music": "song violin piano flute drum trumpet harp organ tune melody fiddle guitar bell horn chorus dance waltz "
             "hymn ballad opera concert whistle choir march singer".split(),
    "money": "pound shilling penny guinea crown coin purse bank debt rent wage price cheque bill loan interest "
             "fortune profit tax income pension bond gold silver dollar".split(),
    "plant": "tree rose lily oak pine grass moss fern ivy daisy violet tulip willow elm birch bush hedge leaf root "
             "branch seed blossom weed thorn reed".split(),
    "writing": "letter book page pen ink paper pencil novel poem diary newspaper journal chapter sentence word "
               "alphabet envelope seal stamp dictionary sermon essay verse manuscript pamphlet".split(),
}

ATTRIBUTES = {
    # attribute -> kind of value
    "favourite colour": "colour", "favourite animal": "animal", "favourite food": "food", "favourite flower": "plant",
    "locker number": "number", "phone extension": "number", "badge number": "number", "door code": "number",
    "house name": "pseudo", "boat name": "pseudo", "dog's name": "pseudo", "middle name": "pseudo",
    "home town": "city", "employer": "company", "instrument": "music", "lucky number": "number",
}
COLOURS = ("red blue green yellow purple orange brown grey black white pink crimson scarlet violet indigo amber "
           "ivory olive teal maroon navy gold silver turquoise lilac").split()

NOISE = ["The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again."]


class Lexicon:
    """Word sources for one split."""

    def __init__(self, split, words, count):
        assert split in SPLITS
        self.split = split
        mine = [w for w in words if split_of(w) == split]
        # code words that the model has to SAY come from the training words in every split: a word that is
        # never an answer in training gets a low score as an answer, however well it was looked up
        self.spoken = [w for w in words if split_of(w) == "train" and count(" " + w) == 1]
        self.easy = [w for w in mine if count(" " + w) == 1]   # one token each
        self.words = [w for w in mine if count(" " + w) <= 2]
        self.first = FIRST
        # colours and category members are closed classes, shared by the splits

    def pseudo(self, rng, syllables=2):
        while True:
            w = "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(syllables))
            if 4 <= len(w) <= 10 and split_of(w) == self.split:
                return w

    def name(self, rng):
        return self.pseudo(rng).capitalize()

    def person(self, rng):
        return rng.choice(self.first) + " " + self.name(rng)

    def company(self, rng):
        return self.name(rng) + " " + rng.choice(("Works", "Foods", "Trust", "Bank", "Press", "Mills", "Motors",
                                                  "Labs"))

    def city(self, rng):
        return self.name(rng) + rng.choice(("ton", "ford", "burg", "ville", "wick", "port"))

    def country(self, rng):
        return self.name(rng) + rng.choice(("ia", "land", "stan", "ora"))

    def code(self, rng):
        """A code word: one token."""
        return rng.choice(self.easy)

    def codes(self, rng, n, spoken=False):
        pool = self.spoken if spoken else self.easy
        return rng.sample(pool, min(n, len(pool)))

    def word(self, rng, ease=0.0):
        return rng.choice(self.easy if rng.random() < ease else self.words)

    def key(self, rng, ease=0.0):
        """RULER-like needle keys: two words joined by a hyphen, or one word."""
        if rng.random() < ease:
            return rng.choice(self.easy)
        if rng.random() < 0.5:
            return rng.choice(self.words) + "-" + rng.choice(self.words)
        return rng.choice(self.words)

    def number(self, rng, digits):
        return str(rng.randrange(10 ** (digits - 1), 10 ** digits))

    def variable(self, rng, letters):
        while True:
            v = "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(letters))
            if v != "VAR" and split_of(v) == self.split:
                return v

    def value(self, rng, kind):
        if kind == "number":
            return self.number(rng, 4)
        if kind == "colour":
            return rng.choice(COLOURS)
        if kind == "pseudo":
            return self.name(rng)
        if kind == "city":
            return self.city(rng)
        if kind == "company":
            return self.company(rng)
        return rng.choice(CATEGORIES[kind])


def word_list(text, size=6000):
    """Common lower-case words of 4 to 9 letters, the most frequent 60 left out."""
    counts = Counter(re.findall(r"(?<![A-Za-z'-])[a-z]{4,9}(?![A-Za-z'-])", text))
    ranked = [w for w, _ in sorted(counts.items(), key=lambda x: (-x[1], x[0]))]
    return ranked[60:60 + size]


def sentences(par):
    out, at = [], 0
    for m in re.finditer(r"[.!?][\"')]* (?=[\"'(A-Z])", par):
        end = m.end() - 1
        if end - at >= 20:
            out.append(par[at:end])
            at = m.end()
    if at < len(par):
        out.append(par[at:])
    return out


class Filler:
    """Sentences of books with running token counts: contiguous filler of a wanted size in O(log n)."""

    def __init__(self, text, count):
        self.sents = []
        self.para_end = []
        for par in text.split("\n"):
            if not par or par == "\x0c":
                continue
            ss = [s for s in sentences(par) if len(s) < 1200]
            for k, s in enumerate(ss):
                self.sents.append(s)
                self.para_end.append(k == len(ss) - 1)
        self._cum = list(accumulate((count(" " + s) for s in self.sents), initial=0))

    def take(self, rng, tokens):
        """Contiguous sentences of at most `tokens` tokens in all, from a random place."""
        return self.sents[slice(*self.span(rng, tokens))]

    def with_breaks(self, rng, tokens):
        """The same as one text, with its line breaks."""
        a, b = self.span(rng, tokens)
        return "".join(s + ("\n" if e else " ") for s, e in zip(self.sents[a:b], self.para_end[a:b])).rstrip()

    def span(self, rng, tokens):
        if tokens <= 0:
            return 0, 0
        total = self._cum[-1]
        tokens = min(tokens, total // 2)
        start = bisect_right(self._cum, rng.random() * (total - tokens)) - 1
        return start, bisect_right(self._cum, self._cum[start] + tokens) - 1


class NoiseFiller:
    """RULER's noise sentences."""

    def __init__(self, count):
        self.cost = [count(" " + s) for s in NOISE]

    def take(self, rng, tokens):
        out, k = [], rng.randrange(len(NOISE))
        while tokens >= self.cost[k % len(NOISE)]:
            tokens -= self.cost[k % len(NOISE)]
            out.append(NOISE[k % len(NOISE)])
            k += 1
        return out


def load_text(path):
    return pathlib.Path(path).read_text(encoding="utf-8")
