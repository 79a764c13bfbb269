"""Documents about made-up people, companies and cities, and questions about them. A seed decides everything.

Sentences are those that splice-tiny was trained to read (tools/train/documents.py), names are of its dev set: no name that
is asked for was in its training. A question needs two documents: who works where, and where that is.
"""
import pathlib
import random
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools" / "train"))
import lexicon  # noqa: E402
import prose  # noqa: E402

INSTRUCTION = "Answer the questions based on the given documents. Only give me the answer and do not output any other words.\n"


class Question:
    """A question, its right answer, and the titles of the documents that say it."""

    def __init__(self, text, answer, titles):
        self.text, self.answer, self.titles = text, answer, titles


class Library:
    """Documents by title, and the questions that they answer."""

    def __init__(self, seed, num_people, num_companies, num_cities, sentences):
        rng = random.Random(f"demo/{seed}")
        words = lexicon.Lexicon("dev", [], len)
        people = names(rng, words.person, num_people)
        companies, cities = names(rng, words.company, num_companies), names(rng, words.city, num_cities)
        self.documents, self.questions = {}, []
        seat = {company: rng.choice(cities) for company in companies}
        for person, spouse in zip(people, people[1:] + people[:1]):
            company = rng.choice(companies)
            self.write(rng, sentences, person, f"{person} works at {company}. {person} was born in {rng.choice(cities)}.")
            self.questions.append(Question(f"In which city does {person} work?", seat[company], (person, company)))
        for company in companies:
            self.write(rng, sentences, company, f"{company} is based in {seat[company]}.")
        for city in cities:
            self.write(rng, sentences, city, f"{city} is located in {words.country(rng)}.")

    def write(self, rng, sentences, title, facts):
        paragraph = prose.Paragraph(rng)
        text = [facts] + [paragraph.sentence() for _ in range(sentences)]
        self.documents[title] = f"Document: {title}. " + " ".join(text)


def names(rng, draw, count):
    """So many different ones."""
    found = {}
    while len(found) < count:
        found[draw(rng)] = None
    return list(found)
