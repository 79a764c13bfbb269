"""Plain sentences without end, for filling contexts where no book is at hand, and as held-out text.

A paragraph keeps to a few people, things and places of its own, which it calls by the same words again: there is
something to attend to beyond the last sentences. No sentence holds a number, a variable or a made-up name, so that none
answers a question of the tasks.
"""
import random

PEOPLE = ("captain doctor farmer teacher painter sailor baker lawyer nurse soldier gardener widow merchant porter miller "
          "tailor judge fisherman shepherd carpenter clerk governor student cook blacksmith").split()
THINGS = ("lantern letter basket rope kettle ladder map umbrella barrel parcel telescope bucket hammer blanket candle "
          "spoon newspaper compass trunk whistle saddle mirror violin ledger key").split()
PLACES = ("harbour market church mill orchard bridge station garden kitchen cellar lighthouse village valley forest inn "
          "library workshop shore courtyard chapel stable meadow quarry tower ferry").split()
TRAITS = "old young tall quiet tired cheerful careful stubborn patient clever honest nervous gentle proud lonely".split()
LOOKS = "broken heavy small rusty wooden empty painted wet precious borrowed forgotten dusty useful strange plain".split()
TIMES = ("In the morning", "Before noon", "After the rain", "Towards evening", "At night", "The next day", "A week later",
         "When the bells rang", "As soon as the fog lifted", "Long after supper", "Without any warning",
         "To everyone's surprise")
ACTS = "carried hid found sold mended dropped borrowed washed lost measured wrapped followed admired described".split()
SAID = ("said", "told us", "believed", "admitted", "insisted", "wrote", "repeated", "suspected", "promised")
MOODS = ("nobody asked why", "the wind had turned", "it began to snow", "the road was empty", "the tide was out",
         "there was no other light", "the others had gone home", "it was far too late", "the dog would not move",
         "the door stood open")


class Paragraph:
    def __init__(self, rng):
        self.rng = rng
        self.people = rng.sample(PEOPLE, 3)
        self.things = rng.sample(THINGS, 3)
        self.places = rng.sample(PLACES, 2)
        self.trait = dict(zip(self.people, rng.sample(TRAITS, 3)))
        self.look = dict(zip(self.things, rng.sample(LOOKS, 3)))

    def person(self):
        p = self.rng.choice(self.people)
        return f"the {self.trait[p]} {p}" if self.rng.random() < 0.5 else f"the {p}"

    def thing(self):
        t = self.rng.choice(self.things)
        return f"the {self.look[t]} {t}" if self.rng.random() < 0.5 else f"the {t}"

    def place(self):
        return "the " + self.rng.choice(self.places)

    def sentence(self):
        rng = self.rng
        person, other = self.person(), self.person()
        text = rng.choice((
            f"{rng.choice(TIMES)} {person} {rng.choice(ACTS)} {self.thing()} near {self.place()}.",
            f"{person} {rng.choice(ACTS)} {self.thing()} and left {self.thing()} at {self.place()}.",
            f"{person} {rng.choice(SAID)} that {other} had never seen {self.thing()} before.",
            f"{rng.choice(TIMES)} {rng.choice(MOODS)}, and {person} waited by {self.place()} with {self.thing()}.",
            f"It was {other} who {rng.choice(ACTS)} {self.thing()}, although {rng.choice(MOODS)}.",
            f"Between {self.place()} and the hill {person} {rng.choice(ACTS)} {self.thing()} for {other}.",
            f'"Leave {self.thing()} where it is," said {person}, because {rng.choice(MOODS)}.',
            f"If {person} had not {rng.choice(('come back', 'slept so long', 'listened'))}, {self.thing()} would still "
            f"be in {self.place()}.",
        ))
        return text[0].upper() + text[1:]


def text(seed, num_paragraphs):
    """That many paragraphs, one a line. The same seed gives the same text."""
    rng = random.Random(f"prose/{seed}")
    lines = []
    for _ in range(num_paragraphs):
        paragraph = Paragraph(rng)
        lines.append(" ".join(paragraph.sentence() for _ in range(rng.randint(5, 12))))
    return "\n".join(lines) + "\n"
